"""Decides what follows the end of a generation: the next one, or the end of the run. The same result on every host."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_BUG, EXIT_CONFIG, EXIT_STOPPED, EXIT_STORAGE, EXIT_TRANSPORT, EXIT_UNFIT, EXIT_USAGE
from elastictrain.launch.membership import messages, poisoned
from elastictrain.launch.membership.records import DRAFT, End, EndKind, Generation, GenerationFailure, GenerationOutcome

_CLEAREST_FIRST = (EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT)
_OTHER_HOST = (EXIT_TRANSPORT, EXIT_STOPPED)  # exit codes of workers where the network or another host is the cause
_MAY_BE_NOTICED = (EXIT_STORAGE, *_OTHER_HOST)  # codes that may be effects of another host's failure, the likelier cause first
_KILLED = 137  # a worker's exit code after SIGKILL: a person, a scheduler, or the kernel without memory
_KILLED_TIMES = 10  # such failures are given up that much later: their cause is outside of the run, and a recovery is cheap
_BLAMED_TIMES = 3  # a host to blame for so many failures in a row is left out for a while


def judge(
    generation: Generation,
    ends: Mapping[str, End],
    options: LaunchGroup,
    *,
    ready: Set[str],
    unaware: Set[str] = frozenset(),
    unheard: Set[str] = frozenset(),
    committed_step: int = 0,
    on_poisoned: poisoned.OnPoisoned = "stop",
) -> Generation:
    """Return the draft that follows an ended generation, without its members: outcome, failures and excluded hosts.

    Called once no end is waited for. `ready` hosts can take part, members or not; those in `unheard` are not connected with all
    the others. `unaware` hosts were excluded by `generation` and have not read that yet. `committed_step` is the newest in
    any member's record: an end that was written while workers still ran may be older.
    """
    number, failures, excluded = generation.number + 1, generation.failures, tuple(sorted(unaware))
    names = {member.host: member.name for member in generation.members}
    # In the order of ranks, so that every host gets the same result.
    ends = {host: ends[host] for host in names if host in ends}
    if names and len(ends) == len(names) and all(end.kind is EndKind.DONE for end in ends.values()):
        return replace(DRAFT, number=number, reason="the last step is done", outcome=GenerationOutcome.DONE)
    cause = find_cause(tuple(ends.values()))
    if cause is not None and cause.exit_code in (EXIT_CONFIG, EXIT_USAGE):
        reason = f"{names[cause.host]}: {cause.reason}"
        return replace(DRAFT, number=number, reason=reason, outcome=GenerationOutcome.GIVE_UP, exit_code=cause.exit_code)
    committed_step = max(committed_step, *(end.committed_step for end in ends.values()), 0)
    if failures and committed_step > failures[-1].committed_step:
        failures = ()
    if unfit := [host for host, end in ends.items() if end.kind is EndKind.FAILED and end.exit_code == EXIT_UNFIT]:
        left_out = tuple(sorted(unaware | {host for host in unfit if host not in ready}))
        reason = f"{names[unfit[0]]} is unfit: {ends[unfit[0]].reason}"
        return replace(DRAFT, number=number, reason=reason, failures=failures, excluded=left_out)
    harmless = _harmless_reason(ends, cause, names, ready=ready, unheard=unheard) if names else generation.reason
    if harmless is not None:
        return replace(DRAFT, number=number, reason=harmless, failures=failures, excluded=excluded)
    committed_step = max(committed_step, *(one.committed_step for one in failures), 0)
    failure = GenerationFailure(generation.number, (), EXIT_BUG, "", 0, committed_step, "its hosts stopped, and none said why")
    if cause is not None:
        hosts, reason = to_blame(cause, ends, members=tuple(names)), f"{names[cause.host]}: {cause.reason}"
        failure = GenerationFailure(generation.number, hosts, cause.exit_code, cause.phase, cause.step, committed_step, reason)
    last = (*failures, failure)[-_BLAMED_TIMES:]
    always = set(failure.hosts).intersection(*(one.hosts for one in last)) if len(last) == _BLAMED_TIMES else ()
    culprit = min(always, default=None)
    others = ready - unheard - {culprit}
    if culprit is not None and culprit in ready and len(others) >= options.min_hosts:
        who, excluded = names.get(culprit, culprit), tuple(sorted(unaware | {culprit}))
        reason = f"{who} was to blame {_BLAMED_TIMES} times in a row, and is left out for a while: {failure.reason}"
        # One failure is kept: if the next generation fails the same way without this host, it was not to blame.
        return replace(DRAFT, number=number, reason=reason, failures=(failure,), excluded=excluded)
    failures = (*failures, failure)
    if cause is not None and (step := poisoned.poisoned_step(failures, max_failures=options.max_failures)):
        restored, before = cause.restored_step, generation.poisoned
        past = poisoned.get_past(step, before, mode=on_poisoned, restored_step=restored, generation=number)
        if past is not None:
            reason = poisoned.describe(step, on_poisoned)
            return replace(DRAFT, number=number, reason=reason, excluded=excluded, poisoned=past)
    return _try_again(number, failures, excluded, options)


def _try_again(
    number: int, failures: tuple[GenerationFailure, ...], excluded: tuple[str, ...], options: LaunchGroup
) -> Generation:
    """The next draft after a failure; the run is given up after too many without progress."""
    only_storage = all(failure.exit_code == EXIT_STORAGE for failure in failures)
    killed = all(failure.exit_code == _KILLED for failure in failures)
    if len(failures) >= options.max_failures * (_KILLED_TIMES if killed else 1):
        code, why = EXIT_STORAGE if only_storage else EXIT_BUG, messages.give_up(failures)
        return replace(DRAFT, number=number, reason=why, outcome=GenerationOutcome.GIVE_UP, failures=failures, exit_code=code)
    # Failing storage gets a pause even before the first retry.
    times = len(failures) + (failures[-1].exit_code == EXIT_STORAGE) - (options.max_failures if killed else 0)
    until_next_s = pause_s(times, options=options)
    return replace(DRAFT, number=number, reason=failures[-1].reason, failures=failures, excluded=excluded, pause_s=until_next_s)


def is_network_suspected(generation: Generation, ends: Mapping[str, End]) -> bool:
    """Whether broken connections are all that is known of a generation's end: hosts may not hear each other any more."""
    cause = find_cause([ends[member.host] for member in generation.members if member.host in ends])
    return len(generation.members) > 1 and cause is not None and cause.exit_code in _OTHER_HOST and not cause.blames


def pause_s(times: int, *, options: LaunchGroup) -> float:
    """Seconds before the next start, after `times` failures without progress: 0 after the first, then exponential."""
    if times <= 1:
        return 0.0
    return min(options.backoff_limit_s, options.backoff_s * 2.0 ** min(times - 2, 60))


def _harmless_reason(
    ends: Mapping[str, End], cause: End | None, names: Mapping[str, str], *, ready: Set[str], unheard: Set[str]
) -> str | None:
    """Why this end is no host's failure; None if it is one.
    If a host has left or is lost, the others' workers fail: their reasons are only effects."""
    if leaving := [host for host, end in ends.items() if end.kind is EndKind.LEAVING]:
        return f"{messages.listed(names[host] for host in leaving)} left: {ends[leaving[0]].reason}"
    # A host that has vanished reports no end of its own, at most that another host is silent.
    away = [host for host in names if host not in ready and (host not in ends or ends[host].kind is EndKind.LOST)]
    if away:
        return f"{messages.listed(names[host] for host in away)} {'is' if len(away) == 1 else 'are'} lost"
    if cause is not None and cause.exit_code not in _OTHER_HOST:
        return None
    if grow := [end.reason for end in ends.values() if end.kind is EndKind.GROW]:
        return grow[0]
    lost = [end for end in ends.values() if end.kind is EndKind.LOST]
    if moved := [end.reason for end in lost if end.lost == end.host]:
        return moved[0]
    if lost:
        pairs = messages.listed(f"{names[end.host]} did not hear {names.get(end.lost, end.lost)}" for end in lost)
        return f"{pairs}, though all of them live"
    not_heard = [names[host] for host in names if host in unheard]
    return f"not all hosts hear {messages.listed(not_heard)}" if not_heard else None


def find_cause(ends: Sequence[End]) -> End | None:
    """The failure that explains the others; among equals one that blames a host, then the first in the given order. None if no
    worker failed."""
    failed = [end for end in ends if end.kind is EndKind.FAILED]
    return min(failed, key=lambda end: (_rank(end.exit_code), not end.blames), default=None)


def to_blame(cause: End, ends: Mapping[str, End], *, members: Sequence[str]) -> tuple[str, ...]:
    """The hosts to blame for a failure; none if all failed alike, or they accuse each other."""
    if cause.exit_code in _OTHER_HOST:
        # The host that more accuse than any other host; none in a tie. One whose own rank hung, or was not attached in time,
        # accuses itself.
        accused: Counter[str] = Counter()
        suspects = frozenset(members)
        for end in ends.values():
            accused.update({*end.blames, *({end.lost} - {end.host})} & suspects)
        most = max(accused.values(), default=0)
        hosts = tuple(host for host in members if accused[host] == most > 0)
        return hosts if len(hosts) == 1 else ()
    alike = [
        host for host, end in ends.items() if end.kind is EndKind.FAILED and _rank(end.exit_code) == _rank(cause.exit_code)
    ]
    hosts = tuple(host for host in members if host in alike)
    return hosts if len(hosts) < len(members) else ()


def _rank(exit_code: int) -> int:
    """Lower explains more. Crashes come between clear causes and codes that may be effects."""
    if exit_code in _CLEAREST_FIRST:
        return _CLEAREST_FIRST.index(exit_code)
    crash = len(_CLEAREST_FIRST)
    return crash + 1 + _MAY_BE_NOTICED.index(exit_code) if exit_code in _MAY_BE_NOTICED else crash
