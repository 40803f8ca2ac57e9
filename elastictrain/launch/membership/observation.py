"""What one host sees of the others' lines in the roster, by its own clock. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastictrain.launch.membership.records import HostRecord, HostState

_REMEMBERED_S = 3600.0
_GONE_KEPT_S, _LEFTOVER_KEPT_S = 120.0, 1800.0


@dataclass(frozen=True, slots=True)
class HostObservation:
    """Another host's line."""

    record: HostRecord
    changed_s: float
    """When its beat was last seen to change, on the reader's monotonic clock; at first sight, when that was."""

    fresh: bool
    """Whether it was ever seen to change: a line that was only read once may be a leftover."""

    since_s: float
    """Since when it has said the same of itself: the same state, and the same generation that it is done with."""

    hears_since_s: float
    """Since when it has heard the same hosts."""


def outdated(observed: Mapping[str, HostObservation], *, now_s: float) -> list[str]:
    """Hosts whose lines nobody needs any more: each start of a launcher leaves one."""
    return [
        host
        for host, one in observed.items()
        if now_s - one.changed_s > (_GONE_KEPT_S if one.record.state is HostState.GONE else _LEFTOVER_KEPT_S)
    ]


def observe(
    before: Mapping[str, HostObservation], records: Iterable[HostRecord], *, own: str, now_s: float
) -> dict[str, HostObservation]:
    """All lines but the own one, as they are now.

    A line that cannot be read this time, or is an older one than before, is left as it was: stores may answer late. It is
    forgotten when it has not changed for very long.
    """
    observed = {host: known for host, known in before.items() if now_s - known.changed_s < _REMEMBERED_S}
    for record in records:
        if record.host == own:
            continue
        known = before.get(record.host)
        if known is None:
            observed[record.host] = HostObservation(record, now_s, fresh=False, since_s=now_s, hears_since_s=now_s)
        elif record.beat > known.record.beat:
            same = (record.state, record.ended) == (known.record.state, known.record.ended)
            hears_since_s = known.hears_since_s if record.hears == known.record.hears else now_s
            observed[record.host] = HostObservation(
                record, now_s, fresh=True, since_s=known.since_s if same else now_s, hears_since_s=hears_since_s
            )
        else:
            observed[record.host] = known
    return observed


def observe_datagrams(
    before: Mapping[str, HostObservation], lines: Iterable[HostRecord], *, own: str, now_s: float
) -> dict[str, HostObservation]:
    """What hosts have said by datagram, before storage shows it; of hosts whose line was never read there, nothing.

    A datagram leaves out what takes room: whom a host hears stays as it was.
    """
    heard = (
        replace(line, hears=before[line.host].record.hears, writers=before[line.host].record.writers)
        for line in lines
        if line.host in before
    )
    return observe(before, heard, own=own, now_s=now_s)
