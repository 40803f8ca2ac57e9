"""Which simulated hosts hear each other."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastictrain.simulate.queue import EventQueue


@dataclass(frozen=True, slots=True, eq=False)
class Outage:
    """Machines that the others do not reach; `one_way`: that do not hear the others, and are heard by them."""

    inside: frozenset[int]
    since_s: float
    one_way: bool


class Network:
    def __init__(self, queue: EventQueue, lost_s: float) -> None:
        self._queue = queue
        self.machine: dict[str, int] = {}  # of each launcher
        self.on_machine: dict[int, list[str]] = {}  # its launchers, one after the other
        self.gone: dict[str, float] = {}  # launchers that are no more, and since when
        self.outages: list[Outage] = []
        self._unheard_s = lost_s / 2
        self._changes_s = [0.0]

    def add(self, host: str, machine: int) -> None:
        self.machine[host] = machine
        self.on_machine.setdefault(machine, []).append(host)

    def remove(self, host: str) -> None:
        """A launcher that has been gone for so long that nobody looks for it any more."""
        del self.gone[host]
        self.on_machine[self.machine.pop(host)].remove(host)

    def change(self, *, delayed: bool) -> None:
        """Note that hosts hear others from now on; `delayed`: others no longer, which shows after half of `lost_s`."""
        self._changes_s.append(self._queue.now_s + (self._unheard_s if delayed else 0.0))

    def heard_since_s(self) -> float:
        """Since when each host has heard the same ones."""
        latest_s = max(one for one in self._changes_s if one <= self._queue.now_s)
        self._changes_s = [one for one in self._changes_s if one >= latest_s]
        return latest_s

    def side(self, machine: int) -> tuple[bool, ...]:
        return tuple(machine in outage.inside for outage in self.outages)

    def missing(self, receiver: str, others: AbstractSet[str], *, for_s: float) -> set[str]:
        """Those of `others` from whom nothing has come for longer than `for_s`."""
        found = {host for host in others & self.gone.keys() if self._queue.now_s - self.gone[host] > for_s}
        for outage in self.outages:
            if self._queue.now_s - outage.since_s > for_s:
                # Few are inside: what each of thousands outside misses must not take a look at all others.
                if self.machine[receiver] in outage.inside:
                    found |= {host for host in others & self.machine.keys() if self.machine[host] not in outage.inside}
                elif not outage.one_way:
                    found |= {host for host in self._inside(outage) if host in others}
        return found

    def _inside(self, outage: Outage) -> list[str]:
        return [host for machine in outage.inside for host in self.on_machine.get(machine, ())]

    def unheard(self, receiver: str, others: AbstractSet[str]) -> set[str]:
        return self.missing(receiver, others, for_s=self._unheard_s) if self.gone or self.outages else set()

    def connected(self, hosts: AbstractSet[str]) -> bool:
        """Whether each reaches each, now."""
        if not hosts.isdisjoint(self.gone):
            return False
        return not any(0 < sum(self.machine[host] in outage.inside for host in hosts) < len(hosts) for outage in self.outages)


class Heard(AbstractSet[str]):
    """Whom a host hears: all but a few, which are looked up when they are asked for."""

    __slots__ = ("_host", "_network")

    def __init__(self, network: Network, host: str) -> None:
        self._network, self._host = network, host

    def __contains__(self, other: object) -> bool:
        return other in self._network.machine and not self._network.unheard(self._host, {str(other)})

    def __rsub__(self, others: AbstractSet[str]) -> set[str]:
        return self._network.unheard(self._host, others)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._network.machine.keys() - self._network.unheard(self._host, self._network.machine.keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self)
