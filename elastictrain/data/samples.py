"""Reads samples under generators that depend on the seed and the sample's position alone, and makes micro-batches of them."""

import hashlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastictrain.config.user_code import describe_value, locate_method, refuse
from elastictrain.data.dataset import Batch, Dataset, FetchesSamples, Sample, rebuild

Collate = Callable[[list[Sample]], Batch]

_NUMPY = "numpy.random"


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on `parts` alone, on every platform."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reads samples and micro-batches of a dataset, in any process."""

    dataset: Dataset
    collate: Collate | None = None
    """A method of the task; None stacks."""

    seed: int | None = None
    """Seeds torch's CPU generator, Python's and NumPy's global one before each sample is read, by its position, and before
    `collate`. None where reading draws no random numbers: then no generator of this process is touched."""

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, sample_ids: Sequence[int], *, first: int) -> Batch:
        """The micro-batch of these samples, whose positions begin at `first`. Raises: as `samples` and `join`."""
        return self.join(self.samples(sample_ids, first=first), first=first)

    def samples(self, sample_ids: Sequence[int], *, first: int) -> list[Sample]:
        """Raises: what the dataset raises, with a note that names the sample."""
        if isinstance(self.dataset, FetchesSamples):
            self.dataset.fetch(sample_ids)
        return [self.read_one(sample_id, position=position) for position, sample_id in enumerate(sample_ids, first)]

    def join(self, samples: list[Sample], *, first: int) -> Batch:
        """Raises: TaskError if the samples cannot be stacked; what `collate` raises, with a note that names the positions."""
        if self.collate is None:
            stacked: Batch = self._stack(samples, first=first)
            return stacked
        self._seed("collate", first)
        try:
            return self.collate(samples)
        except Exception as error:
            error.add_note(f"in `collate` of the samples at positions [{first}, {first + len(samples)})")
            raise

    def read_one(self, sample_id: int, *, position: int) -> Sample:
        """The sample at `position`. Raises: as `samples`."""
        self._seed("sample", position)
        has_numpy = _NUMPY in sys.modules
        try:
            sample = self.dataset[sample_id]
            if not has_numpy and _NUMPY in sys.modules:
                # The dataset has imported it just now, so it drew from a generator that was not seeded.
                self._seed("sample", position)
                sample = self.dataset[sample_id]
        except Exception as error:
            error.add_note(f"in {locate_method(self.dataset, '__getitem__')} of sample {sample_id}, at position {position}")
            raise
        return sample

    def _seed(self, purpose: str, position: int) -> None:
        if self.seed is None:
            return
        seed = derive_seed(self.seed, purpose, position)
        # Not `torch.manual_seed`: where CUDA is not started it notes its caller's stack, which takes longer than all the rest.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy_random := sys.modules.get(_NUMPY)) is not None:
            numpy_random.seed(seed & 0xFFFFFFFF)

    def _stack(self, samples: Sequence[Sample], *, first: int, path: str = "") -> Any:
        """Tensors, arrays and numbers become tensors with one more dimension; the nest stays."""
        one = samples[0]
        kind = _kind(one)
        for index, other in enumerate(samples):
            if _kind(other) != kind:
                must = "return samples of one kind, shape and dtype, or the task must have a method `collate`"
                trouble = f"{path or 'its sample'} is {describe_value(one)} at position {first} and {describe_value(other)}"
                raise refuse(self.dataset, "__getitem__", must, trouble, position=first + index)
        if isinstance(one, Tensor):
            return torch.stack(list(samples))
        if isinstance(one, bool | int | float):
            return torch.tensor(samples)
        if type(one).__module__ == "numpy":
            return torch.stack([torch.as_tensor(sample) for sample in samples])
        if isinstance(one, str | bytes):
            return list(samples)
        if isinstance(one, Mapping):
            return {
                name: self._stack([sample[name] for sample in samples], first=first, path=f"{path}[{name!r}]") for name in one
            }
        if isinstance(one, list | tuple):
            places = enumerate(zip(*samples, strict=True))
            return rebuild(one, [self._stack(parts, first=first, path=f"{path}[{place}]") for place, parts in places])
        must = "return tensors, arrays and numbers (in mappings, lists or tuples), or the task must have a method `collate`"
        raise refuse(self.dataset, "__getitem__", must, f"{path or 'it'} is {describe_value(one)}", position=first)


def _kind(sample: Sample) -> object:
    """What must be alike in samples that are stacked."""
    if isinstance(sample, Tensor):
        return sample.dtype, sample.shape
    if isinstance(sample, Mapping):
        return sample.keys()
    if isinstance(sample, list | tuple):
        return type(sample), len(sample)
    return type(sample), getattr(sample, "dtype", None), getattr(sample, "shape", None)
