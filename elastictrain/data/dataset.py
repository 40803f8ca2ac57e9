"""Map-style samples: the interface between the loader and the data that is trained on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Batch = Mapping[str, Tensor]  # named tensors, or whatever nest of tensors a task's samples or its `collate` make
Sample = Any  # a nest (mappings, lists, tuples) of tensors, arrays, numbers and texts


class Dataset(Protocol):
    """Samples by index: any rank may read any index in [0, len) at any time.

    Random numbers that are drawn from torch, `random` or `numpy.random` while a sample is read are the same whenever its
    position in the run is read again.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample:
        """One sample, without a batch dimension. Samples of one micro-batch are stacked, or joined by the task's `collate`."""


@runtime_checkable
class FetchesSamples(Protocol):
    """A data set that reads several samples at once faster than one after another."""

    def fetch(self, indices: Sequence[int], /) -> None:
        """Called with the samples of a micro-batch before they are asked for by index, in the same process."""


def map_tensors(nest: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with `function` of each tensor; what is no tensor stays."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return {name: map_tensors(one, function) for name, one in nest.items()}
    if isinstance(nest, list | tuple):
        return rebuild(nest, [map_tensors(one, function) for one in nest])
    return nest


def rebuild(like: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    """`parts` in a list, tuple or named tuple like `like`."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def leaves(nest: Any) -> Iterator[Any]:
    """Whatever is in a nest and no collection."""
    if isinstance(nest, Mapping | list | tuple):
        for one in nest.values() if isinstance(nest, Mapping) else nest:
            yield from leaves(one)
    else:
        yield nest
