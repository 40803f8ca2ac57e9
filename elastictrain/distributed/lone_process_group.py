"""A process group for DDP that communicates with nobody. Collectives of torch's fake group return no tensor; DDP needs one."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class FinishedWork(dist.Work):
    """A collective that is over; its tensors stay as they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        devices: list[int | str | torch.device] | None = [tensors[0].device] if tensors[0].is_cuda else None
        self._future: torch.futures.Future[Sequence[Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[Sequence[Tensor]]":
        return self._future


class LoneProcessGroup(dist.ProcessGroup):
    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # what a subclass in Python takes

    def allreduce(self, tensors: Sequence[Tensor], options: object = None) -> dist.Work:  # type: ignore[override]
        return FinishedWork(tensors)

    def broadcast(self, tensors: Sequence[Tensor], options: object = None) -> dist.Work:  # type: ignore[override]
        return FinishedWork(tensors)

    def getBackendName(self) -> str:  # noqa: N802
        return "lone"
