"""Which connections are given up where too many have not proven yet that they belong to the run. Pure."""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLimits:
    """Those of connections that are not authenticated yet."""

    handshake_s: float = 2.0
    """From accepting a connection to its proof."""

    most: int = 256
    most_per_address: int = 128
    """Hosts of a run may share one address with strangers, behind a gateway."""


class PendingConnections(Generic[K]):
    """Connections that are not authenticated yet, oldest first.

    A new one is always taken in: strangers that stay silent cannot keep others out. Where there are too many the oldest one of
    the address that has the most goes, so that few addresses with many connections harm themselves alone.
    """

    def __init__(self, limits: PendingLimits) -> None:
        self._limits = limits
        self._known: dict[K, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, connection: K, *, address: str, now_s: float) -> K | None:
        """Take one in; returns the one that is given up for it, if there is one."""
        self._known[connection] = (address, now_s)
        counts = Counter(known for known, _ in self._known.values())
        if counts[address] > self._limits.most_per_address:
            crowded = {address}
        elif len(self._known) > self._limits.most:
            largest = max(counts.values())
            crowded = {known for known, count in counts.items() if count == largest}
        else:
            return None
        given_up = next(one for one, (known, _) in self._known.items() if known in crowded)
        del self._known[given_up]
        return given_up

    def remove(self, connection: K) -> None:
        """It is authenticated, or gone."""
        self._known.pop(connection, None)

    def give_up_oldest(self) -> K | None:
        """Where there is room for none: the oldest one, which is no longer waited for."""
        oldest = next(iter(self._known), None)
        if oldest is not None:
            del self._known[oldest]
        return oldest

    def take_overdue(self, *, now_s: float) -> list[K]:
        """Those whose time is over; they are no longer waited for."""
        overdue = [one for one, (_, since_s) in self._known.items() if now_s - since_s > self._limits.handshake_s]
        for one in overdue:
            del self._known[one]
        return overdue
