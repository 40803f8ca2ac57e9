"""Map-style samples: the interface between the loader and the data that is trained on."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]  # named tensors; those of a micro-batch have a first dimension that counts samples


class Dataset(Protocol):
    """Samples by index: any rank may read any index in [0, len) at any time, and always gets the same sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch:
        """One sample: name -> tensor without a batch dimension. Samples of one micro-batch are stacked."""
