"""The first collective of a new group, in a thread: NCCL connects the ranks in it, which takes 0.2 s and more, while the main
thread restores the state."""

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastictrain.distributed.group import Group
from elastictrain.errors import PreflightError
from elastictrain.identity import Identity

_POLL_S = 0.01


class FirstCollective:
    """A sum over all ranks, and whether it is right. Until `wait` has returned nobody else may use the default group, whose
    collectives would be paired with it. Collective: yes."""

    def __init__(self, group: Group, identity: Identity) -> None:
        self._device, self._rank, self._world_size = group.device, identity.rank, identity.world_size
        # Its thread may be late, and would find the default group of the next generation.
        self._default = dist.group.WORLD
        self._began, self._seconds = time.monotonic(), 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="first-collective", daemon=True)
        self._thread.start()

    def wait(self, poll: Callable[[], None]) -> float:
        """How many seconds it took. `poll` is called meanwhile, and may raise to leave early. Raises: PreflightError for a
        wrong sum; what torch raises for none."""
        while self._thread.is_alive():
            poll()
            self._thread.join(_POLL_S)
        if self._error is not None:
            raise self._error
        return self._seconds

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                # The main thread's stream is full of copies.
                with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
                    self._sum()
            else:
                self._sum()
        except Exception as error:  # noqa: BLE001  # raised by `wait`
            self._error = error
        self._seconds = time.monotonic() - self._began

    def _sum(self) -> None:
        ranks = torch.full((2,), self._rank + 1, dtype=torch.int64, device=self._device)
        dist.all_reduce(ranks, group=self._default)
        if (found := ranks.tolist()) != [self._world_size * (self._world_size + 1) // 2] * 2:
            raise PreflightError(f"the first collective of the new group returned {found}, which is wrong")
