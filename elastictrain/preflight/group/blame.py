"""Whether what ranks did wrong is the fault of one host. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.outcome import host_of
from elastictrain.preflight.verdict import Scope, Status, Verdict


def scope_of(culprits: Collection[int], members: Sequence[GroupMember]) -> Scope:
    """HOST if all that are to blame are ranks of one host, and not simply all that there are."""
    hosts = {members[rank].host for rank in culprits}
    return Scope.HOST if len(hosts) == 1 and len(culprits) < len(members) else Scope.GROUP


def agreed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of all parts of the checks. Where the parts of one check blame several hosts, no host is to blame."""
    blamed: dict[str, set[str]] = {}
    for verdict in filter(_blames, verdicts):
        blamed.setdefault(verdict.check, set()).add(host_of(verdict.subject))
    return [
        replace(verdict, scope=Scope.GROUP) if _blames(verdict) and len(blamed[verdict.check]) > 1 else verdict
        for verdict in verdicts
    ]


def _blames(verdict: Verdict) -> bool:
    return verdict.scope is Scope.HOST and verdict.status is Status.FAIL
