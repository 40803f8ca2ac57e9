"""Map-style samples: the seam between the loader and whatever is trained on."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]  # named tensors; of a sample without, of a micro-batch with a first dimension that counts samples


class Dataset(Protocol):
    """Samples by index; any index in [0, len) at any time, on any rank, always the same sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch:
        """One sample: name -> tensor without a batch dimension. Samples of one micro-batch are stacked."""
