"""What one host sees of the others' lines in the roster, by its own clock. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastictrain.launch.membership.records import Entry, HostState

_REMEMBERED_S = 3600.0
_GONE_KEPT_S, _LEFTOVER_KEPT_S = 120.0, 1800.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Another host's line."""

    entry: Entry
    changed_s: float
    """When its beat was last seen to change, on the reader's monotonic clock; at first sight, when that was."""

    fresh: bool
    """Whether it was ever seen to change: a line that was only read once may be a leftover."""

    since_s: float
    """Since when it has said the same of itself: the same state, and the same generation that it is done with."""

    hears_since_s: float
    """Since when it has heard the same hosts."""


def outdated(seen: Mapping[str, Seen], *, now_s: float) -> list[str]:
    """Hosts whose lines nobody needs any more: each start of a launcher leaves one."""
    return [
        host
        for host, one in seen.items()
        if now_s - one.changed_s > (_GONE_KEPT_S if one.entry.state is HostState.GONE else _LEFTOVER_KEPT_S)
    ]


def see(before: Mapping[str, Seen], entries: Iterable[Entry], *, own: str, now_s: float) -> dict[str, Seen]:
    """All lines but the own one, as they are now.

    A line that cannot be read this time, or is an older one than before, is left as it was: stores may answer late. It is
    forgotten when it has not changed for very long.
    """
    seen = {host: known for host, known in before.items() if now_s - known.changed_s < _REMEMBERED_S}
    for entry in entries:
        if entry.host == own:
            continue
        known = before.get(entry.host)
        if known is None:
            seen[entry.host] = Seen(entry, now_s, fresh=False, since_s=now_s, hears_since_s=now_s)
        elif entry.beat > known.entry.beat:
            same = (entry.state, entry.ended) == (known.entry.state, known.entry.ended)
            hears_since_s = known.hears_since_s if entry.hears == known.entry.hears else now_s
            seen[entry.host] = Seen(
                entry, now_s, fresh=True, since_s=known.since_s if same else now_s, hears_since_s=hears_since_s
            )
        else:
            seen[entry.host] = known
    return seen


def hear_lines(before: Mapping[str, Seen], lines: Iterable[Entry], *, own: str, now_s: float) -> dict[str, Seen]:
    """What hosts have said by datagram, before storage shows it; of hosts whose line was never read there, nothing.

    A datagram leaves out what takes room: whom a host hears stays as it was.
    """
    heard = (
        replace(line, hears=before[line.host].entry.hears, writers=before[line.host].entry.writers)
        for line in lines
        if line.host in before
    )
    return see(before, heard, own=own, now_s=now_s)
