"""Ends a process that makes no progress, after it has reported where it is stuck."""

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from math import inf

from elastictrain.config.composed import FaultGroup
from elastictrain.errors import EXIT_STOPPED, EXIT_TRANSPORT
from elastictrain.fault.closable_thread import ClosableThread
from elastictrain.fault.stop import StopRequest
from elastictrain.liveness.progress import STEP_PHASES, Phase, ProgressMark

LOST_PATIENCE_S = 0.5  # how long a collective may take to notice by itself that a peer has ended
LAUNCHER_PATIENCE_S = 5.0  # how long a launcher may take to have this process detach
_AGREEMENT_MARGIN_S = 5.0  # the agreement on a generation has its own limit and names the missing ranks: it must end first
_OVERSLEPT_S = 2.0  # a watchdog that has not run for so long was stopped with its process: that time is no silence


@dataclass(frozen=True, slots=True)
class Overdue:
    """Why a process must end, and its exit code."""

    exit_code: int
    reason: str
    show_stacks: bool = True  # whether its stacks help a reader
    hangs: bool = False  # whether the cause is a hang: then everything that the group knows is useful


@dataclass(frozen=True, slots=True)
class LostPeer:
    """A process of the group that has ended without notice; `since_s` is monotonic."""

    name: str
    since_s: float
    patience_s: float = LOST_PATIENCE_S  # how long something else may take to free this process from its wait


@dataclass(frozen=True, slots=True)
class Others:
    """What is known of the other ranks."""

    lost: LostPeer | None = None
    in_vain: bool = False  # whether, by their heartbeats, nothing will end a silence beyond this rank's bound


NOTHING_HEARD = Others()
_OUTSIDE = (Phase.STANDBY, Phase.DETACH, Phase.END)  # where a process waits for no other rank


def limit_s(mark: ProgressMark, options: FaultGroup) -> float:
    """How long the phase of `mark` may last at most."""
    if mark.phase is Phase.STANDBY:
        return inf
    if mark.phase is Phase.RENDEZVOUS:
        return options.rendezvous_timeout_s + _AGREEMENT_MARGIN_S
    if mark.phase is Phase.SAVE:
        return options.save_timeout_s
    if mark.phase in (Phase.DETACH, Phase.END):
        return options.shutdown_grace_s
    return options.step_timeout_s if _is_short(mark) else options.init_timeout_s


def bound_s(mark: ProgressMark, options: FaultGroup) -> float:
    """How long the phase of `mark` may last by this rank's own earlier steps; at most its limit."""
    most_s = limit_s(mark, options)
    if not _is_short(mark) or not mark.usual_s:
        return most_s
    return min(most_s, max(options.hang_floor_s, options.hang_multiple * mark.usual_s))


def _is_short(mark: ProgressMark) -> bool:
    """Whether the phase is a known part of a step. EVAL is not: the first evaluation compiles the model, without gradients. Nor
    is a STEP: there an evaluation looks like a hang."""
    return mark.phase in STEP_PHASES - {Phase.STEP, Phase.EVAL} and mark.first_step_done and not mark.compiling


def judge(
    mark: ProgressMark, *, now_s: float, stop: StopRequest | None, options: FaultGroup, others: Others = NOTHING_HEARD
) -> Overdue | None:
    """Decide whether this process must end now. `now_s` is on the clock of `mark.since_s`.

    A rank that only waits for a working one is not ended before its limit.
    """
    lost = others.lost
    silent_s = now_s - mark.since_s
    most_s = bound_s(mark, options) if others.in_vain else limit_s(mark, options)
    if silent_s > most_s:
        reason = f"no progress for {silent_s:.1f} s in {mark} (limit {most_s:g} s)"
        return Overdue(EXIT_TRANSPORT, reason, hangs=True)
    if lost is not None and mark.phase not in _OUTSIDE and now_s - lost.since_s > lost.patience_s:
        return Overdue(EXIT_TRANSPORT, f"{lost.name} is gone, and {mark} cannot end without it", show_stacks=False)
    if stop is None or mark.phase in (Phase.SAVE, *_OUTSIDE):
        return None
    # A survivor of a dead group hangs in a collective that no rank will join, and torchrun waits half a minute for it.
    # But a phase that takes long in a healthy run gets the time that it is known to take.
    patience_s = max(options.shutdown_grace_s, 2 * mark.longest_s)
    waited_s = now_s - max(stop.since_s, mark.since_s)
    if waited_s > patience_s:
        reason = f"asked to stop ({stop.reason}), but {mark} did not end within {patience_s:g} s"
        # Before the first step a large model takes long to build: stacks do not help a reader.
        return Overdue(EXIT_TRANSPORT if mark.first_step_done else EXIT_STOPPED, reason, show_stacks=mark.first_step_done)
    return None


@dataclass(eq=False)
class Watchdog(ClosableThread):
    """A thread that judges this process at short intervals, and calls `end` as long as the process must end.

    `end` returns only if the process leaves its generation instead. Otherwise it writes its report and calls os._exit: an
    exception in a thread would end nothing.
    """

    options: FaultGroup
    _: KW_ONLY
    mark: Callable[[], ProgressMark]
    stop: Callable[[], StopRequest | None]
    end: Callable[[Overdue], None]
    others: Callable[[], Others] = lambda: NOTHING_HEARD
    beat: Callable[[], None] = lambda: None  # called at each turn, to show others that threads of this process can run
    clock: Callable[[], float] = time.monotonic
    interval_s: float = 0.1

    def __post_init__(self) -> None:
        self._prepare(self._watch, name="watchdog", close_s=1.0)

    def _watch(self) -> None:
        awake_since_s, awake_s = float("-inf"), self.clock()
        while not self._closed.wait(self.interval_s):
            self.beat()
            # The mark is read before the clock: a newer mark could otherwise lie after `now_s`.
            mark, now_s = self.mark(), self.clock()
            if now_s - awake_s > self.interval_s + _OVERSLEPT_S:
                awake_since_s = now_s
            awake_s = now_s
            mark = replace(mark, since_s=max(mark.since_s, awake_since_s))
            overdue = judge(mark, now_s=now_s, stop=self.stop(), options=self.options, others=self.others())
            if overdue is not None:
                self.end(overdue)
