"""What follows the end of a generation: the next one, or the end of the run. Pure, and the same on every host that asks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.config.launch import LaunchGroup
from elastictrain.errors import (
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TRANSPORT,
    EXIT_UNFIT,
    EXIT_USAGE,
)
from elastictrain.launch.membership import blame, messages
from elastictrain.launch.membership.records import End, EndKind, Generation, GenerationFailure, GenerationOutcome

_MAY_BE_NOTICED = (EXIT_TRANSPORT, EXIT_STOPPED)
"""What workers say where the network or another host is the cause."""

_BLAMED_TIMES = 3
"""So many failures in a row that one host is to blame for, and it is left out for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What is known of a generation that has ended, once nobody is waited for any more."""

    generation: Generation
    ends: Mapping[str, End]
    ready: frozenset[str]
    """Hosts that can take part in the next generation, members or not."""

    unaware: frozenset[str] = frozenset()
    """Hosts that this generation had excluded, and that have not read so yet."""

    unheard: frozenset[str] = frozenset()
    """Those of `ready` that do not hear all of the others, or are not heard by them: the next generation is without them."""

    committed_step: int = 0
    """The newest committed step of any member's record: an end that was written while workers still ran knows less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    """What the next generation is for; its fields are those of `Generation`."""

    outcome: GenerationOutcome
    reason: str
    failures: tuple[GenerationFailure, ...] = ()
    excluded: tuple[str, ...] = ()
    pause_s: float = 0.0
    exit_code: int = EXIT_OK


BEGIN = NextGeneration(outcome=GenerationOutcome.RUN, reason="")
"""The first generation of a run, or the first after one that had been for good."""


def judge(result: GenerationResult, options: LaunchGroup) -> NextGeneration:
    """The next generation's purpose, what it remembers of failures, and whom it leaves out."""
    generation, ends = result.generation, _of_members(result)
    names = {member.host: member.name for member in generation.members}
    if generation.members and len(ends) == len(names) and all(end.kind is EndKind.DONE for end in ends.values()):
        return NextGeneration(outcome=GenerationOutcome.DONE, reason="the last step is done")
    cause = blame.find_cause(tuple(ends.values()))
    if cause is not None and cause.exit_code in (EXIT_CONFIG, EXIT_USAGE):
        reason = f"{names[cause.host]}: {cause.reason}"
        return NextGeneration(outcome=GenerationOutcome.GIVE_UP, exit_code=cause.exit_code, reason=reason)
    committed_step = max(result.committed_step, *(end.committed_step for end in ends.values()), 0)
    failures = _since_progress(generation.failures, committed_step)
    if unfit := [host for host, end in ends.items() if end.kind is EndKind.FAILED and end.exit_code == EXIT_UNFIT]:
        left_out = _excluded(result, [host for host in unfit if host not in result.ready])
        reason = f"{names[unfit[0]]} is unfit: {ends[unfit[0]].reason}"
        return NextGeneration(outcome=GenerationOutcome.RUN, failures=failures, excluded=left_out, reason=reason)
    if (harmless := _harmless_reason(result, ends, cause, names)) is not None:
        return NextGeneration(outcome=GenerationOutcome.RUN, failures=failures, excluded=_excluded(result), reason=harmless)
    failure = _failure(
        generation, ends, cause, committed_step=max(committed_step, *(one.committed_step for one in failures), 0)
    )
    return _after_failure(result, (*failures, failure), names, options)


def is_network_suspected(generation: Generation, ends: Mapping[str, End]) -> bool:
    """Whether all that is known of a generation's end is that connections broke: hosts may not hear each other any more."""
    known = [ends[member.host] for member in generation.members if member.host in ends]
    cause = blame.find_cause(known)
    return len(generation.members) > 1 and cause is not None and cause.exit_code in _MAY_BE_NOTICED and not cause.blames


def pause_s(times: int, *, options: LaunchGroup) -> float:
    """Before the next start, after `times` failures without progress: none after the first, then longer and longer."""
    if times <= 1:
        return 0.0
    return min(options.backoff_limit_s, options.backoff_s * 2.0 ** min(times - 2, 60))


def _of_members(result: GenerationResult) -> dict[str, End]:
    """The members' ends, in the order of ranks: whoever asks gets the same answer."""
    return {member.host: result.ends[member.host] for member in result.generation.members if member.host in result.ends}


def _since_progress(failures: tuple[GenerationFailure, ...], committed_step: int) -> tuple[GenerationFailure, ...]:
    """The failures that still count: none once a newer step is committed than when the last of them happened."""
    return () if failures and committed_step > failures[-1].committed_step else failures


def _excluded(result: GenerationResult, hosts: Sequence[str] = ()) -> tuple[str, ...]:
    return tuple(sorted(result.unaware.union(hosts)))


def _harmless_reason(
    result: GenerationResult, ends: Mapping[str, End], cause: End | None, names: Mapping[str, str]
) -> str | None:
    """Why this end counts as nobody's failure; None if it does not.

    Where a host has left or is lost, the others' workers fail: whatever they say is only what they noticed.
    """
    if not result.generation.members:
        return result.generation.reason
    if leaving := [host for host, end in ends.items() if end.kind is EndKind.LEAVING]:
        return f"{messages.listed(names[host] for host in leaving)} left: {ends[leaving[0]].reason}"
    away = [host for host in names if host not in result.ready and _said_nothing(ends.get(host))]
    if away:
        return f"{messages.listed(names[host] for host in away)} {'is' if len(away) == 1 else 'are'} lost"
    only_noticed = cause is None or cause.exit_code in _MAY_BE_NOTICED
    if not only_noticed:
        return None
    if grow := [end.reason for end in ends.values() if end.kind is EndKind.GROW]:
        return grow[0]
    if moved := [end.reason for end in ends.values() if end.kind is EndKind.LOST and end.lost == end.host]:
        return moved[0]
    if lost := [end for end in ends.values() if end.kind is EndKind.LOST]:
        pairs = messages.listed(f"{names[end.host]} did not hear {names.get(end.lost, end.lost)}" for end in lost)
        return f"{pairs}, though all of them live"
    unheard = [names[host] for host in names if host in result.unheard]
    return f"not all hosts hear {messages.listed(unheard)}" if unheard else None


def _said_nothing(end: End | None) -> bool:
    """Of a host that is not there any more: whether it says nothing of its own end, but at most that another is silent."""
    return end is None or end.kind is EndKind.LOST


def _failure(generation: Generation, ends: Mapping[str, End], cause: End | None, *, committed_step: int) -> GenerationFailure:
    names = {member.host: member.name for member in generation.members}
    if cause is not None:
        hosts = blame.to_blame(cause, ends, members=tuple(names))
        reason = f"{names[cause.host]}: {cause.reason}"
        return GenerationFailure(generation.number, hosts, cause.exit_code, cause.phase, cause.step, committed_step, reason)
    return GenerationFailure(generation.number, (), EXIT_BUG, "", 0, committed_step, "its hosts stopped, and none said why")


def _after_failure(
    result: GenerationResult, failures: tuple[GenerationFailure, ...], names: Mapping[str, str], options: LaunchGroup
) -> NextGeneration:
    culprit = _always_to_blame(failures)
    if culprit is not None and culprit in result.ready and len(_group(result) - {culprit}) >= options.min_hosts:
        # One is remembered: if the same goes on without this host, it was not to blame.
        return NextGeneration(
            outcome=GenerationOutcome.RUN,
            failures=failures[-1:],
            excluded=_excluded(result, [culprit]),
            reason=f"{names.get(culprit, culprit)} was to blame {_BLAMED_TIMES} times in a row, and is left out for a while: "
            f"{failures[-1].reason}",
        )
    if len(failures) >= options.max_failures:
        reason = messages.give_up(failures)
        only_storage = all(failure.exit_code == EXIT_STORAGE for failure in failures)
        exit_code = EXIT_STORAGE if only_storage else EXIT_BUG
        return NextGeneration(outcome=GenerationOutcome.GIVE_UP, failures=failures, exit_code=exit_code, reason=reason)
    # Storage that fails is given time even before the first try.
    times = len(failures) + (failures[-1].exit_code == EXIT_STORAGE)
    return NextGeneration(
        outcome=GenerationOutcome.RUN,
        failures=failures,
        excluded=_excluded(result),
        pause_s=pause_s(times, options=options),
        reason=failures[-1].reason,
    )


def _group(result: GenerationResult) -> frozenset[str]:
    return result.ready - result.unheard


def _always_to_blame(failures: Sequence[GenerationFailure]) -> str | None:
    """The host that each of the last failures has among its culprits."""
    last = failures[-_BLAMED_TIMES:]
    if len(last) < _BLAMED_TIMES:
        return None
    common = set(last[0].hosts).intersection(*(failure.hosts for failure in last))
    return min(common, default=None)
