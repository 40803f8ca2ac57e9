"""Which of a generation's ends explains the others, and which hosts are to blame. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from elastictrain.errors import EXIT_CONFIG, EXIT_STOPPED, EXIT_STORAGE, EXIT_TRANSPORT, EXIT_UNFIT, EXIT_USAGE
from elastictrain.launch.membership.records import End, EndKind

_CLEAREST_FIRST = (EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT)
_MAY_BE_NOTICED = (EXIT_STORAGE, EXIT_TRANSPORT, EXIT_STOPPED)
"""What the workers of a host may say because of what happened on another one, the likelier cause first."""


def find_cause(ends: Sequence[End]) -> End | None:
    """The failure that explains the others; the first in the given order among equals. None if no worker failed."""
    failed = [end for end in ends if end.kind is EndKind.FAILED]
    return min(failed, key=lambda end: _rank(end.exit_code), default=None)


def to_blame(cause: End, ends: Mapping[str, End], *, members: Sequence[str]) -> tuple[str, ...]:
    """The hosts that a failure is to be blamed on; none where all of them failed alike, or they accuse each other."""
    if cause.exit_code in (EXIT_TRANSPORT, EXIT_STOPPED):
        return most_accused(ends, members=members)
    alike = _rank(cause.exit_code)
    hosts = tuple(host for host in members if host in ends and _failed_like(ends[host], alike))
    return hosts if len(hosts) < len(members) else ()


def most_accused(ends: Mapping[str, End], *, members: Sequence[str]) -> tuple[str, ...]:
    """The host that more of the others accuse than any other; none in a tie."""
    accused: Counter[str] = Counter()
    for end in ends.values():
        accused.update({*end.blames, end.lost}.intersection(members) - {end.host})
    most = max(accused.values(), default=0)
    hosts = [host for host in members if accused[host] == most > 0]
    return (hosts[0],) if len(hosts) == 1 else ()


def _failed_like(end: End, rank: int) -> bool:
    return end.kind is EndKind.FAILED and _rank(end.exit_code) == rank


def _rank(exit_code: int) -> int:
    """The smaller, the more it explains. A crash of any kind comes between what is clear and what may only be noticed."""
    if exit_code in _CLEAREST_FIRST:
        return _CLEAREST_FIRST.index(exit_code)
    crash = len(_CLEAREST_FIRST)
    return crash + 1 + _MAY_BE_NOTICED.index(exit_code) if exit_code in _MAY_BE_NOTICED else crash
