"""Decides which hosts are silent. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Heard:
    """Who is listened to, and when each was heard last. All times on this host's monotonic clock."""

    since_s: float
    """From when on silence counts."""

    looked_s: float
    """When this was looked at last."""

    hosts: frozenset[str] = frozenset()
    last_s: Mapping[str, float] = field(default_factory=dict)


def listen_to(hosts: Collection[str], *, now_s: float) -> Heard:
    """Begin anew with these hosts."""
    return Heard(now_s, now_s, frozenset(hosts))


def hear(heard: Heard, hosts: Iterable[str], *, now_s: float) -> Heard:
    """Words of `hosts` have come by now."""
    return replace(heard, last_s={**heard.last_s, **{host: now_s for host in hosts if host in heard.hosts}})


def audible(last_s: Mapping[str, float], *, now_s: float, within_s: float) -> frozenset[str]:
    """Hosts of which something came within that time."""
    return frozenset(host for host, heard_s in last_s.items() if now_s - heard_s <= within_s)


def look(heard: Heard, *, now_s: float, lost_s: float) -> tuple[Heard, frozenset[str]]:
    """Who has been silent for longer than `lost_s`.

    A process that was frozen itself has heard nobody meanwhile, which says nothing about them: after a pause of its own all
    have their time again.
    """
    if now_s - heard.looked_s > lost_s / 2:
        heard = Heard(now_s, now_s, heard.hosts)
    silent = frozenset(
        host for host in heard.hosts if now_s - max(heard.since_s, heard.last_s.get(host, heard.since_s)) > lost_s
    )
    return replace(heard, looked_s=now_s), silent
