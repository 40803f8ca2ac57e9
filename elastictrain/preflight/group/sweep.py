"""Measures bus bandwidth over collectives and sizes."""

import time
from collections.abc import Callable, Iterator

import psutil
import torch
from torch import Tensor

from elastictrain.preflight.group.backend import Collectives
from elastictrain.preflight.group.bandwidth import Point, fitting_sizes, has_time, num_rounds
from elastictrain.preflight.group.collectives import Collective
from elastictrain.preflight.group.options import GroupOptions


class Sweep:
    """Collectives at growing sizes, until time is up. All ranks agree on what comes next, because they agree on the times."""

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
        """The sizes that fit into `free_bytes` (the least of all ranks). Quick: all-reduce only. Collective: yes."""
        sizes = self._options.sweep_sizes(cuda=self._device.type == "cuda", full=full)
        sizes = fitting_sizes(sizes, free_bytes=free_bytes)
        wanted = tuple(Collective) if full else (Collective.ALL_REDUCE,)
        # Zeros, because a sum of anything else would grow from round to round. A whole number of parts for every rank.
        length = self._length(sizes[-1])
        buffers = torch.zeros(2, length, dtype=torch.float32, device=self._device)
        return [point for collective in wanted for point in self._grow(collective, sizes, buffers, len(wanted), at)]

    def _grow(
        self, collective: Collective, sizes: tuple[int, ...], buffers: Tensor, num_collectives: int, at: Callable[[str], None]
    ) -> Iterator[Point]:
        budget_s = self._options.sweep_budget_s / num_collectives
        spent_s, once_s, before = 0.0, 0.0, sizes[0]
        for size in sizes:
            if not has_time(once_s, growth=size / before, spent_s=spent_s, budget_s=budget_s):
                return
            at(f"{collective} of {size} bytes")
            length = self._length(size)
            output, buffer = buffers[0, :length], buffers[1, :length]
            first_s = self._time(collective, output, buffer, rounds=1)
            once_s = self._time(collective, output, buffer, rounds=1)
            rounds = num_rounds(once_s, budget_s=self._options.point_budget_s)
            once_s = self._time(collective, output, buffer, rounds=rounds)
            spent_s += first_s + once_s * (rounds + 1)
            before = size
            yield Point(collective, length * buffers.itemsize, once_s, self._world_size)

    def _time(self, collective: Collective, output: Tensor, buffer: Tensor, *, rounds: int) -> float:
        """Seconds of one round, on the slowest rank."""
        self._settle()
        began = self._clock()
        for _ in range(rounds):
            self._call(collective, output, buffer)
        self._settle()
        return self._slowest((self._clock() - began) / rounds)

    def _call(self, collective: Collective, output: Tensor, buffer: Tensor) -> None:
        part = len(buffer) // self._world_size
        match collective:
            case Collective.ALL_REDUCE:
                self._collectives.all_reduce(buffer)
            case Collective.ALL_GATHER:
                self._collectives.all_gather(output, buffer[:part])
            case Collective.REDUCE_SCATTER:
                self._collectives.reduce_scatter(output[:part], buffer)
            case Collective.BROADCAST:
                self._collectives.broadcast(buffer, root=0)
            case Collective.ALL_TO_ALL:
                self._collectives.all_to_all(output, buffer)
            case Collective.SEND_RECV:
                before, after = (self._rank - 1) % self._world_size, (self._rank + 1) % self._world_size
                self._collectives.send_recv(output, buffer, source=before, target=after)

    def _slowest(self, seconds: float) -> float:
        times = torch.zeros(self._world_size, dtype=torch.float64, device=self._device)
        times[self._rank] = seconds
        self._collectives.all_reduce(times)
        return float(times.max())

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _length(self, num_bytes: int) -> int:
        return max(1, num_bytes // (4 * self._world_size)) * self._world_size


def free_memory(device: torch.device, *, local_world_size: int) -> int:
    """Bytes that this rank may take for a moment."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // local_world_size
