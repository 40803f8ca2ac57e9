"""Measures bus bandwidth, the rate of matrix products, and what passes between pairs of GPUs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from elastictrain.preflight.group.collectives import Collectives
from elastictrain.preflight.group.options import GroupOptions

_FEWEST, _MOST = 3, 40


@dataclass(frozen=True, slots=True)
class Point:
    """One measured figure. `num_bytes`: of the whole message."""

    num_bytes: int
    seconds: float
    world_size: int

    @property
    def bus_gbs(self) -> float:
        """GB/s (1e9 bytes) over the bus."""
        return self._bus_gbs(self.seconds)

    def reachable_gbs(self, gbs: float, *, slack_s: float) -> float:
        """The figure of this message on a bus of `gbs` where an all-reduce takes `slack_s` before anything flows."""
        return self._bus_gbs(self.seconds * self.bus_gbs / gbs + slack_s)

    def _bus_gbs(self, seconds: float) -> float:
        return self.num_bytes / seconds * factor(self.world_size) / 1e9


def factor(world_size: int) -> float:
    """What each link carries, as a share of the whole message.

    Source: the performance notes of nccl-tests; of n parts, n - 1 have to leave their rank, and their sums to come back.
    """
    return 2 * (world_size - 1) / world_size


def fitting_sizes(sizes: tuple[int, ...], *, free_bytes: int) -> tuple[int, ...]:
    """Those for which there is room: a message in, one out, and as much again for others. At least the smallest."""
    return tuple(size for size in sizes if 4 * size <= free_bytes) or sizes[:1]


def num_rounds(once_s: float, *, budget_s: float) -> int:
    """How often an all-reduce that takes `once_s` is repeated; the same on all ranks if they agree on that."""
    return max(_FEWEST, min(_MOST, int(budget_s / max(once_s, 1e-6))))


def has_time(once_s: float, *, growth: float, spent_s: float, budget_s: float) -> bool:
    """Whether a message that is `growth` times larger than the one that took `once_s` is still affordable."""
    return spent_s + once_s * growth * (_FEWEST + 2) <= budget_s


def size_text(num_bytes: int) -> str:
    """As people write sizes of messages, in powers of 1024; an odd number of ranks makes them a few bytes less."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= 0.999 * size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


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


_CUDA_SIDE, _CPU_SIDE = 8192, 256
_FEWEST_PRODUCTS, _MOST_PRODUCTS = 5, 200
_MATRICES = 3


def matmul_tflops(device: torch.device, *, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """TFLOP/s of the fastest product within `budget_s`, after a warm-up: bfloat16 on a GPU, float32 on a CPU.

    The fastest, because what else a processor does makes products slower, and never faster. Raises: RuntimeError if the device
    fails, or has no memory.
    """
    cuda = device.type == "cuda"
    side = _CUDA_SIDE if cuda else _CPU_SIDE
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda and torch.cuda.mem_get_info(device)[0] < 2 * _MATRICES * side * side * dtype.itemsize:
        side //= 4
    one = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(one)
    times: list[float] = []
    _settle(device)
    until = clock() + 2 * budget_s
    # The first ones wake the device up, and load its library. They do not count.
    while len(times) < 2 * _FEWEST_PRODUCTS or (clock() < until and len(times) < _MOST_PRODUCTS):
        began = clock()
        torch.mm(one, one, out=out)
        _settle(device)
        times.append(clock() - began)
    best = min(times[_FEWEST_PRODUCTS:])
    return 2 * side**3 / best / 1e12


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PAIR_BYTES = 64 << 20
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Reach:
    """What a rank receives from another one of its host. `access`: directly from its memory; None is unknown."""

    source: int
    gbs: float
    access: bool | None


def pair_rounds(num: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, in which each of `num` meets each other once.

    Source: the circle method of tournaments: one stays, the others move on by a place; an odd one out rests.
    """
    places = list(range(num + num % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure_pairs(
    collectives: Collectives,
    *,
    rank: int,
    neighbours: Sequence[int],
    device: torch.device,
    num_bytes: int = PAIR_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Reach]:
    """What this rank receives from each other one. `neighbours`: ranks of this host, by local rank.

    Collective: within a host.
    """
    own = neighbours.index(rank)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    found = []
    for pairs in pair_rounds(len(neighbours)):
        for low, high in pairs:
            if own not in (low, high):
                continue
            # One direction after the other: both at once share what is between them, where that is PCIe.
            for source, target in ((low, high), (high, low)):
                peer = neighbours[target if own == source else source]
                seconds = _pass_on(collectives, buffer, peer=peer, sends=own == source, clock=clock)
                if own == target:
                    found.append(Reach(peer, num_bytes / seconds / 1e9, _access(device, own, source)))
    return found


def _pass_on(collectives: Collectives, buffer: Tensor, *, peer: int, sends: bool, clock: Callable[[], float]) -> float:
    """Seconds of one message. The first one connects, and is not counted."""
    began = 0.0
    for index in range(_ROUNDS + 1):
        if index == 1:
            _settle(buffer.device)
            began = clock()
        collectives.send_recv(None if sends else buffer, buffer if sends else None, source=peer, target=peer)
    _settle(buffer.device)
    return (clock() - began) / _ROUNDS


def _access(device: torch.device, own: int, other: int) -> bool | None:
    """None where each process sees its own device only."""
    if device.type != "cuda" or device.index != own or torch.cuda.device_count() <= other:
        return None
    return bool(torch.cuda.can_device_access_peer(own, other))
