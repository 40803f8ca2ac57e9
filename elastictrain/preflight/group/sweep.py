"""Measures the bus bandwidth of all-reduce over growing sizes."""

import time
from collections.abc import Callable

import psutil
import torch

from elastictrain.preflight.group.backend import Collectives
from elastictrain.preflight.group.bandwidth import Point, fitting_sizes, has_time, num_rounds
from elastictrain.preflight.group.options import GroupOptions


class Sweep:
    """All-reduce at growing sizes, until time is up. All ranks agree on what comes next, because they agree on the times."""

    def __init__(
        self,
        collectives: Collectives,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        options: GroupOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._collectives = collectives
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._options = options
        self._clock = clock

    def run(self, *, full: bool, free_bytes: int, at: Callable[[str], None]) -> list[Point]:
        """The sizes that fit into `free_bytes` (the least of all ranks). Collective: yes."""
        sizes = self._options.sweep_sizes(cuda=self._device.type == "cuda", full=full)
        sizes = fitting_sizes(sizes, free_bytes=free_bytes)
        # Zeros, because a sum of anything else would grow from round to round.
        message = torch.zeros(sizes[-1] // 4, dtype=torch.float32, device=self._device)
        points: list[Point] = []
        spent_s, once_s, before = 0.0, 0.0, sizes[0]
        for size in sizes:
            if not has_time(once_s, growth=size / before, spent_s=spent_s, budget_s=self._options.sweep_budget_s):
                break
            at(f"all_reduce of {size} bytes")
            buffer = message[: size // 4]
            first_s = self._time(buffer, rounds=1)
            once_s = self._time(buffer, rounds=1)
            rounds = num_rounds(once_s, budget_s=self._options.point_budget_s)
            once_s = self._time(buffer, rounds=rounds)
            spent_s += first_s + once_s * (rounds + 1)
            before = size
            points.append(Point(size, once_s, self._world_size))
        return points

    def _time(self, buffer: torch.Tensor, *, rounds: int) -> float:
        """Seconds of one round, on the slowest rank."""
        self._settle()
        began = self._clock()
        for _ in range(rounds):
            self._collectives.all_reduce(buffer)
        self._settle()
        times = torch.zeros(self._world_size, dtype=torch.float64, device=self._device)
        times[self._rank] = (self._clock() - began) / rounds
        self._collectives.all_reduce(times)
        return float(times.max())

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def free_memory(device: torch.device, *, local_world_size: int) -> int:
    """Bytes that this rank may take for a moment."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // local_world_size
