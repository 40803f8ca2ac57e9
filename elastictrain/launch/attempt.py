"""One host's part in a generation: its state, and how the end of its workers is judged."""

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from elastictrain import errors
from elastictrain.events import event_time
from elastictrain.fault.launcher_channel import AskToStop
from elastictrain.fault.reasons import Reason
from elastictrain.fault.stop import StopRequest
from elastictrain.launch.membership.messages import listed
from elastictrain.launch.membership.records import End, EndKind, Generation
from elastictrain.launch.workers_of_generation import WorkersEnd

_BY_THEMSELVES_S = 0.5  # grace period after a worker has reported an error: the others find and report it, too
_ASKED_S = 30.0  # after SIGTERM, before SIGKILL; the same as torchrun
_REUSED_S = 10.0  # after its start, workers that have everything built must have gone to meet the others
_IN_PLACE_S = 10.0  # limit for making the groups of a recovery in place on one host
_MARGIN_S = 10.0  # a worker has limits of its own, and reports more when it ends itself
_DETACHED_S = 2.5  # after it was told to detach, a worker that still takes part is killed: it hangs, or has not begun to listen
_ACKNOWLEDGE_S = 0.5  # a worker that does not answer for so long when it is to detach is killed, where another one is ready
# Exit codes that name a cause, the clearest first. After them come a worker's death and a transport failure, often its effect.
_EXPLAINS_MOST = (errors.EXIT_CONFIG, errors.EXIT_USAGE, errors.EXIT_UNFIT, errors.EXIT_BUG, errors.EXIT_STORAGE)

_OWN_CODES = frozenset((errors.EXIT_OK, *_EXPLAINS_MOST, errors.EXIT_TRANSPORT, errors.EXIT_STOPPED))

_SIGNAL_BASE = 128


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A generation in which this host takes part. Times are monotonic."""

    generation: Generation
    joined_s: float
    started: bool = False
    introduced_by_s: float = inf  # by when all workers of this host must have gone to meet the others
    attached_by_s: float = inf  # by when their groups must be made
    begun: bool = False  # whether a worker of this host has reported its first step
    asked: End | None = None  # why this host ends it, None while it does not; another host's end if that came first
    host_stays: bool = False  # whether this host takes part in a later generation, as its workers were told
    asked_s: float = inf
    detach_s: float = inf  # when to have the workers detach
    acknowledge_by_s: float = inf  # by when they must have said that they were told
    ask_s: float = inf  # when to ask the workers to stop; repeated, as they forget what they hear before they begin their part
    kill_s: float = inf
    codes: Mapping[int, int] = field(default_factory=dict)  # exit codes of its workers that failed first, by local rank
    hung: Collection[int] = ()  # its ranks that hung while others waited for them
    finished_step: int = 0  # the newest one of any worker of this host
    broken_off: bool = False
    broken_at: float = 0.0  # unix time of that

    def start(self, *, now_s: float, reused: bool, in_place: bool, init_timeout_s: float) -> None:
        """The workers are started. `reused`: all of them existed, with everything built. `in_place`: on unchanged hosts."""
        self.started = True
        self.introduced_by_s = now_s + (_REUSED_S if reused else init_timeout_s + _MARGIN_S)
        if in_place and reused and len(self.generation.members) == 1:
            # On several hosts, another one may have to build what it lacks.
            self.attached_by_s = self.introduced_by_s + _IN_PLACE_S

    def late(self, *, now_s: float, silent: Sequence[int], attached: bool) -> str:
        """Why the workers of this host count as hung before the first step; empty if they do not. `silent`: the local ranks
        that have not gone to meet the others: from outside they look like a host behind a firewall."""
        if self.asked is not None:
            return ""
        if silent and now_s >= self.introduced_by_s:
            ranks = ", ".join(map(str, silent))
            return f"local rank(s) {ranks} did not get as far as meeting the others in time, and count as hung"
        if not attached and now_s >= self.attached_by_s:
            return "the workers did not make their new groups in time"
        return ""

    def lose_worker(self, codes: Mapping[int, int], *, now_s: float) -> None:
        """Schedule the end of the generation on this host after workers have ended, with `codes` by local rank; may be called
        repeatedly."""
        if all(code in _OWN_CODES and code != errors.EXIT_TRANSPORT for code in codes.values()):
            self.ask_s = min(self.ask_s, now_s + _BY_THEMSELVES_S)
            self.kill_s = min(self.kill_s, now_s + _BY_THEMSELVES_S + _ASKED_S)
        else:
            self.break_off(now_s=now_s)

    def break_off(self, *, now_s: float) -> None:
        """The group is broken, and its workers have nothing to save: have them detach at once."""
        if not self.broken_off:
            self.broken_off, self.broken_at, self.detach_s = True, event_time(), now_s

    def detaching(self, *, now_s: float) -> None:
        """The workers are told to detach now, which may be late: they have as much time as ever."""
        self.detach_s, self.acknowledge_by_s = inf, now_s + _ACKNOWLEDGE_S
        self.kill_s = min(self.kill_s, now_s + _DETACHED_S)

    def finish(self, end: End, *, at_once: bool, now_s: float, stop_limit_s: float, request: StopRequest | None) -> bool:
        """End the generation here; returns whether this is the first request. `stop_limit_s` limits an orderly end; `request`:
        that to this host, None if it stays."""
        deadline_s = inf if request is None or request.deadline_s is None else request.deadline_s
        self.host_stays = request is None
        if at_once:
            # Also during an orderly end: without the group it cannot complete.
            self.break_off(now_s=now_s)
        asked = self.asked
        if asked is None:
            self.asked, self.asked_s = end, now_s
            if not at_once:
                self.kill_s = min(self.kill_s, now_s + stop_limit_s if deadline_s == inf else deadline_s)
                self.ask_s = now_s
            return True
        # The host may be taken away, or sooner than announced: an end for another reason gets less time.
        self.kill_s = min(self.kill_s, deadline_s)
        is_own = (asked.host, asked.kind) == (end.host, EndKind.LEAVING)
        if asked.loses_state or is_own or end.kind is not EndKind.LEAVING or request is None:
            return False
        # It was asked to leave in another orderly end: the next generation must not count on it.
        self.asked, self.ask_s = end, min(self.ask_s, now_s)
        return True

    def conclude(self, own: End) -> End:
        """How the generation ended here; `own`: what the workers of this host tell by themselves. An end that was requested
        explains how they end, unless they had reached the last step already, or had found this host unfit: all hosts learn
        that in one moment, and another one may be the first to end the generation."""
        asked = self.asked
        if asked is None or own.kind is EndKind.DONE:
            return own
        return own if own.exit_code == errors.EXIT_UNFIT and asked.host != own.host else asked

    @property
    def reason(self) -> str:
        """Why the workers are to leave the generation."""
        return self.asked.reason if self.asked is not None else "a worker of this host has failed"

    def stop_message(self, *, now_s: float) -> AskToStop:
        # Workers add "asked to stop" themselves.
        reason = self.reason.removeprefix("asked to stop (").removesuffix(")")
        return AskToStop(reason, time.time() + self.kill_s - now_s, self.host_stays)


def judge_end(ended: WorkersEnd, *, generation: Generation, host: str, committed_step: int) -> End:
    """Return how the generation ended here, where no end was requested."""
    number, reasons = generation.number, ended.reasons
    if ended.code == errors.EXIT_OK:
        return End(number, host, EndKind.DONE, errors.EXIT_OK, "", 0, committed_step, "the last step is done")
    # A reason left by or for a worker explains its code: a hung worker is ended by SIGKILL.
    explained = {reason.rank - generation.first_rank(host) for reason in reasons}
    strange = [(rank, code) for rank, code in sorted(ended.codes.items()) if code not in _OWN_CODES and rank not in explained]
    # A local rank whose exit code is none of ours; preferably one that was not sent SIGTERM.
    dead = min(strange, key=lambda one: one[1] == -signal.SIGTERM, default=None)
    chosen = _choose(ended, dead)
    if chosen is None:
        exit_code, sentence = _describe_death(ended, dead)
        where = next((reason for reason in reasons if reason.exit_code == errors.EXIT_TRANSPORT), None)
        phase, step = (where.phase, where.step) if where else ("", 0)
        return End(number, host, EndKind.FAILED, exit_code, phase, step, committed_step, sentence)
    missing = {generation.host_of(rank): None for rank in chosen.missing}
    missing.pop(host, None)
    sentence = chosen.sentence
    if missing:
        names = listed(member.name for member in generation.members if member.host in missing)
        sentence = f"{names} did not meet the workers of this host: {sentence}"
    # As where heartbeats of a host stop arriving: a link may be down, and then no host is at fault.
    lost = next(iter(missing), "")
    return End(
        number,
        host,
        EndKind.LOST if lost else EndKind.FAILED,
        chosen.exit_code,
        chosen.phase,
        chosen.step,
        committed_step,
        sentence,
        lost=lost,
        blames=(host,) if any(reason.guilty for reason in reasons) else tuple(missing),
        restored_step=max(0, chosen.step - 1) if ended.begun is None else ended.begun,
    )


def what_died(end: End, attempt: Attempt, *, host: str) -> tuple[str, ...]:
    """The ranks of `host` that died or `hung`, if it is the one that failed; else the host that failed or was lost."""
    names = {member.host: member.name for member in attempt.generation.members}
    name, first = names.get(end.host, end.host), attempt.generation.first_rank(end.host)
    dead = {first + rank for rank, code in attempt.codes.items() if code not in _OWN_CODES}.union(attempt.hung)
    ranks = sorted(dead) if end.host == host else ()
    return tuple(f"rank {rank} on {name}" for rank in ranks) or (names.get(end.lost or end.host, name),)


def _describe_death(ended: WorkersEnd, dead: tuple[int, int] | None) -> tuple[int, str]:
    if dead is not None:
        rank, code = dead
        if code < 0:
            return _SIGNAL_BASE - code, f"local rank {rank} was ended by {_signal_name(-code)}"
        return errors.EXIT_BUG, f"local rank {rank} ended with exit code {code} and left no reason"
    if ended.code < 0:
        return _SIGNAL_BASE - ended.code, f"the fork server was ended by {_signal_name(-ended.code)}"
    known = [code for code in (*_EXPLAINS_MOST, errors.EXIT_TRANSPORT, errors.EXIT_STOPPED) if code in ended.codes.values()]
    if known:
        return known[0], f"workers ended and left no reason (exit code {known[0]})"
    return errors.EXIT_BUG, f"workers ended and left no reason (fork server: {ended.code})"


def _choose(ended: WorkersEnd, dead: tuple[int, int] | None) -> Reason | None:
    """Return the reason that explains most; None if a worker or the fork server died without one: the others only noticed."""
    # The fork server's own reason (no rank) comes last: it knows least of the workers.
    last_first = sorted(ended.reasons, key=lambda reason: (reason.rank >= 0, -reason.rank))
    by_code = {reason.exit_code: reason for reason in last_first}
    for code in _EXPLAINS_MOST:
        if code in by_code:
            return by_code[code]
    guilty = next((reason for reason in ended.reasons if reason.guilty), None)
    # A hung worker was killed by its host, which left the reason.
    if guilty is None and (ended.code < 0 or (dead is not None and dead[1] != -signal.SIGTERM)):
        return None
    return guilty or by_code.get(errors.EXIT_TRANSPORT) or by_code.get(errors.EXIT_STOPPED)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
