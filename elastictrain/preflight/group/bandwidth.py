"""Bus bandwidth: what the time of an all-reduce says about the links, whatever the number of ranks. Pure."""

from dataclasses import dataclass

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
