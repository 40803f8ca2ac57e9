"""A tensor on its way from the device to the host."""

import torch
from torch import Tensor


class HostCopy:
    """Begins to copy a small tensor; whoever needs it later waits for it, and for nothing that the device does after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._content = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._content.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._content = tensor

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._content
