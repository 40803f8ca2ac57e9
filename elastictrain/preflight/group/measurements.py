"""Measures bus bandwidth, and bandwidth between pairs of GPUs."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch
from torch import Tensor

from elastictrain.distributed.device import settle
from elastictrain.preflight.group.collectives import MB, Collectives
from elastictrain.preflight.links.rounds import Round, tournament

SWEEP_BUDGET_S = 5.0  # no larger message starts after this: a slow link already shows with the smaller ones
_POINT_BUDGET_S = 0.05  # for one size, but at least `_FEWEST` rounds
_FEWEST, _MOST = 3, 40
PAIR_BYTES = 64 * MB
ROUNDS = 5  # transfers that are measured, after one that is not


@dataclass(frozen=True, slots=True)
class BandwidthPoint:
    num_bytes: int  # of the whole message
    seconds: float
    world_size: int

    @property
    def bus_gbs(self) -> float:
        """GB/s (1e9 bytes) over the bus: of n parts, n - 1 leave their rank, and their sums come back. Source: nccl-tests."""
        return self.num_bytes / self.seconds * 2 * (self.world_size - 1) / self.world_size / 1e9

    def reachable_gbs(self, gbs: float, *, slack_s: float) -> float:
        """The figure of this message on a bus of `gbs` where an all-reduce takes `slack_s` before anything flows."""
        return replace(self, seconds=self.seconds * self.bus_gbs / gbs + slack_s).bus_gbs


def sweep_sizes(*, cuda: bool, full: bool, table: bool = False, free_bytes: int) -> tuple[int, ...]:
    """Growing message sizes in bytes, at least one, that take at most a quarter of the memory; of a `table` from 1 KB on."""
    sizes = (MB, 64 * MB, 1024 * MB) if cuda else (MB, 16 * MB)
    wanted = tuple(1024 << power for power in range(0, 21 if cuda else 17, 2)) if table else sizes if full else sizes[:-1]
    return tuple(size for size in wanted if 4 * size <= free_bytes) or sizes[:1]


def size_text(num_bytes: int) -> str:
    """A message size in powers of 1024; an odd number of ranks makes it a few bytes smaller."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= 0.999 * size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


def measure_all_reduce(
    collectives: Collectives,
    at: Callable[[str], None],
    *,
    sizes: tuple[int, ...],
    clock: Callable[[], float] = time.perf_counter,
) -> list[BandwidthPoint]:
    """All-reduce at growing sizes until the budget is spent, by times on which the ranks agree. Collective: yes."""
    device, world_size = collectives.device, collectives.world_size
    # Zeros: the sum of anything else would grow from round to round.
    message = torch.zeros(sizes[-1] // 4, dtype=torch.float32, device=device)

    def measure(buffer: Tensor, *, rounds: int = 1) -> float:
        """Seconds of one round, on the slowest rank."""
        times = torch.zeros(world_size, dtype=torch.float64, device=device)
        act = partial(collectives.all_reduce, buffer)
        times[collectives.rank] = seconds_of(act, device=device, rounds=rounds, clock=clock)
        collectives.all_reduce(times)
        return float(times.max())

    spent_s, once_s, points = 0.0, 0.0, list[BandwidthPoint]()
    for size in sizes:
        # Time grows with the size.
        if points and spent_s + once_s * size / points[-1].num_bytes * (_FEWEST + 2) > SWEEP_BUDGET_S:
            break
        at(f"all_reduce of {size} bytes")
        buffer = message[: size // 4]
        first_s, once_s = measure(buffer), measure(buffer)
        rounds = max(_FEWEST, min(_MOST, int(_POINT_BUDGET_S / max(once_s, 1e-6))))
        once_s = measure(buffer, rounds=rounds)
        spent_s += first_s + once_s * (rounds + 1)
        points.append(BandwidthPoint(size, once_s, world_size))
    return points


def free_memory(device: torch.device, *, local_world_size: int) -> int:
    """Bytes that this rank may use briefly."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // local_world_size


def seconds_of(
    act: Callable[[], object], *, device: torch.device, rounds: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one of `rounds` calls, from a device without work until it has none again."""
    settle(device)
    began = clock()
    for _ in range(rounds):
        act()
    settle(device)
    return (clock() - began) / rounds


@dataclass(frozen=True, slots=True)
class PairBandwidth:
    """Bandwidth from another rank of this host."""

    source: int
    gbs: float  # GB/s
    access: bool | None  # direct access to its memory; None: unknown


def measure_pairs(
    collectives: Collectives,
    *,
    neighbours: Sequence[int],
    rounds: Iterable[Round] | None = None,
    num_bytes: int = PAIR_BYTES,
) -> list[PairBandwidth]:
    """What this rank receives from each of `neighbours`, or in `rounds` of indices of them. Collective: among them."""
    own, device = neighbours.index(collectives.rank), collectives.device
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    found = []
    rounds = tournament(range(len(neighbours))) if rounds is None else rounds
    pairs = (pair for paired in rounds for pair in paired if own in pair)
    # One direction after the other: over PCIe both at once would share the bandwidth.
    for source, target in (way for low, high in pairs for way in ((low, high), (high, low))):
        peer = neighbours[target if own == source else source]
        output, message = (None, buffer) if own == source else (buffer, None)
        transfer = partial(collectives.send_recv, output, message, source=peer, target=peer)
        transfer()  # it connects
        seconds = seconds_of(transfer, device=device, rounds=ROUNDS)
        if own == target:
            access = None
            # Unknown if each process sees only its own device.
            if device.type == "cuda" and device.index == own and torch.cuda.device_count() > source:
                access = bool(torch.cuda.can_device_access_peer(own, source))
            found.append(PairBandwidth(peer, num_bytes / seconds / 1e9, access))
    return found
