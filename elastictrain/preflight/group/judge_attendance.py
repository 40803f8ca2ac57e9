"""Who is to blame when ranks do not come through a part together. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from elastictrain.preflight.group.attendance import Attendance, PartState
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.policy import host_of
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


_MOST_NAMED = 8


def judge_attendance(check: str, attendance: Attendance, members: Sequence[GroupMember]) -> list[Verdict]:
    """One failure for each culprit; nothing if all came through.

    Those that did not enter are to blame, even if others are stuck: they wait for them. Then those that entered and have not
    been heard of since, then those that raised, and where all are stuck, those that came least far.
    """
    if attendance.complete:
        return []
    culprits = list(_culprits(attendance))
    ranks = [rank for rank, _, _ in culprits]
    # What a rank raises is often about the other end of a connection.
    raised = any(rank in attendance.words and attendance.words[rank].state is PartState.BROKEN for rank in ranks)
    scope = Scope.GROUP if raised else scope_of(ranks, members)
    verdicts = [
        Verdict(
            check=check,
            scope=scope,
            subject=members[rank].name,
            status=Status.FAIL,
            measured=measured,
            expected=f"all {attendance.world_size} ranks through {attendance.part}",
            seconds=attendance.seconds,
            remedy=remedy_for(members[rank], was_there=was_there),
        )
        for rank, measured, was_there in culprits[:_MOST_NAMED]
    ]
    if (rest := len(culprits) - _MOST_NAMED) > 0:
        verdicts.append(
            Verdict(
                check=check,
                scope=Scope.GROUP,
                subject="all",
                status=Status.FAIL,
                measured=f"{rest} more ranks likewise",
                expected=f"all {attendance.world_size} ranks through {attendance.part}",
                seconds=attendance.seconds,
                remedy="see to the ranks that are named first",
            )
        )
    return verdicts


def remedy_for(member: GroupMember, *, was_there: bool) -> str:
    """Where to look for a rank that is missing, or hangs."""
    without = f"to go on without {member.host}, start the others with a smaller --nnodes"
    if member.pid is None:
        return f"on {member.host} look for rank {member.rank} (`pgrep -af elastictrain`) and at what it printed; {without}"
    if not was_there:
        return f"on {member.host} see what rank {member.rank} does: `py-spy dump --pid {member.pid}`; {without}"
    return (
        f"on {member.host} see where rank {member.rank} is: `py-spy dump --pid {member.pid}`; start again with NCCL_DEBUG=INFO "
        f"to see which connection it waits for; {without}"
    )


def _culprits(attendance: Attendance) -> Iterator[tuple[int, str, bool]]:
    part, limit = attendance.part, f"within {attendance.limit_s:g} s"
    ranks = range(attendance.world_size)
    if absent := [rank for rank in ranks if rank not in attendance.entered]:
        yield from ((rank, f"did not enter {part} {limit}", False) for rank in absent)
        return
    if silent := [rank for rank in ranks if rank not in attendance.words]:
        yield from ((rank, f"entered {part} and gave no word {limit}", True) for rank in silent)
        return
    words = attendance.words
    if broken := [rank for rank in ranks if words[rank].state is PartState.BROKEN]:
        yield from ((rank, f"broke in {part}: {words[rank].detail}", True) for rank in broken)
        return
    stuck = [rank for rank in ranks if words[rank].state is PartState.STUCK]
    least = min(words[rank].num_begun for rank in stuck)
    for rank in stuck:
        if words[rank].num_begun == least:
            where = f" at {words[rank].detail}" if words[rank].detail else ""
            yield rank, f"no answer from {part}{where} {limit}", True
