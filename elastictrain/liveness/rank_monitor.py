"""Watches the workers of one host from outside, and ends those that cannot end themselves."""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.events import Hang
from elastictrain.fault.reasons import Reason
from elastictrain.liveness.diagnosis import HangDiagnosis, RankStatus
from elastictrain.liveness.monitor_client import MonitoredHost
from elastictrain.liveness.progress import Phase
from elastictrain.liveness.progress_file import ProgressFileReader, RankProgress
from elastictrain.liveness.stacks import take_stacks
from elastictrain.processes import PROC, read_stat

logger = logging.getLogger(__name__)

TURN_S = 0.2
_LONGEST_TURN_S = 1.0  # during the rest of a longer turn this process was not running, so the workers may not have been either
_TELL_S = 1.0  # bound on writing to the terminal: its reader may be stopped, and its pipe full
_NOBODY_S = 10.0  # the first worker's progress file exists before its monitor; if none is found, that worker has ended
PULSE_S = 2.0  # a process whose watchdog has not run for so long is stopped, or a thread of it holds the interpreter's lock

assert PULSE_S > 2 * TURN_S  # noqa: S101  # a change of the pulse is seen only between two looks

SURVIVOR_S = 1.4  # how long a process may wait for a rank of its group that has ended; it ends itself before, if it can
LAUNCHED_S = 4.0  # the same under a launcher, which has it leave the group and kills it if it does not
ENDING_S = 8.0  # the same for a process that already ends, and reports why
_MARGIN_S = 3.0  # how late a process may be with its own limits
Kind = Literal["stopped", "frozen", "stuck", "left behind"]
_WHY: dict[Kind, str] = {
    "stopped": "was stopped by a signal {silent_s:.1f} s ago in {mark}, and was not continued within {bound_s:g} s",
    "frozen": (
        "has been in {mark} for {silent_s:.1f} s (bound {bound_s:g} s), and none of its other threads has run for "
        "{still_s:.1f} s: one of them holds the interpreter's lock"
    ),
    "stuck": "has been in {mark} for {silent_s:.1f} s, and does not end itself as it should",
    "left behind": "waits in {mark} for a rank of this host that is gone",
}


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """One rank of this host, seen from outside. Times count only while the observer itself was running."""

    marks: RankProgress
    unchanged_s: float  # since its mark changed
    still_s: float  # since its pulse changed
    stopped: bool = False
    gone_s: float | None = None  # since it ended; None while it lives


@dataclass(frozen=True, slots=True)
class KillDecision:
    seen: ObservedRank
    kind: Kind
    silent_s: float
    bound_s: float

    @property
    def hangs(self) -> bool:
        """Whether the rank is at fault, and does not only wait for one that has ended."""
        return self.kind != "left behind"

    def __str__(self) -> str:
        marks, still_s = self.seen.marks, self.seen.still_s
        return _WHY[self.kind].format(mark=marks.mark, silent_s=self.silent_s, bound_s=self.bound_s, still_s=still_s)


def judge(seen: Sequence[ObservedRank], *, survivor_s: float = SURVIVOR_S) -> list[KillDecision]:
    """The ranks to kill now, and why. `survivor_s`: how long a rank may wait for one of this host that has ended. Pure."""
    seen = [one for one in seen if not one.marks.closed]
    longest_gone_s = max((one.gone_s or 0.0 for one in seen if one.marks.mark.phase is not Phase.END), default=0.0)
    decisions = []
    for one in seen:
        marks = one.marks
        latest_s = marks.limit_s + marks.grace_s + _MARGIN_S
        patience_s = ENDING_S if marks.ending else survivor_s
        if one.gone_s is not None:
            continue
        if one.stopped and one.still_s > marks.stopped_s:
            decisions.append(KillDecision(one, "stopped", one.still_s, marks.stopped_s))
        # A process that runs ends itself, knows of the others when it does so, and gets the time to report it.
        elif one.still_s > PULSE_S and one.unchanged_s > marks.bound_s and not marks.ending:
            decisions.append(KillDecision(one, "frozen", one.unchanged_s, marks.bound_s))
        elif one.unchanged_s > latest_s:
            decisions.append(KillDecision(one, "stuck", one.unchanged_s, latest_s))
        elif longest_gone_s > patience_s and marks.mark.phase is not Phase.END:
            decisions.append(KillDecision(one, "left behind", longest_gone_s, patience_s))
    return decisions


class LiveWorker:
    """A process of this host and its progress file."""

    def __init__(self, folder: str, rank: int) -> None:
        """Raises: OSError if the file does not exist or the process has ended; ValueError."""
        self._reader = ProgressFileReader(folder, rank)
        try:
            # From now on the descriptor means the process of this file, even if another one gets the pid.
            self._descriptor = os.pidfd_open(self._reader.pid)
        except OSError:
            self._reader.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._seen: ObservedRank | None = None

    def look(self, awake_s: float) -> ObservedRank | None:
        """Its state `awake_s` after the last look; None without a mark. Raises: ProcessLookupError if it ended without one."""
        marks = self._reader.read()
        if marks is None:
            # Killed in the middle of a mark, before the first look: no process will complete that mark.
            if self._poll.poll(0):
                raise ProcessLookupError(self._reader.pid)
            return None
        before = self._seen or ObservedRank(marks, 0.0, 0.0)
        stat = read_stat(PROC / str(marks.pid))
        gone_s = 0.0 if self._poll.poll(0) or stat is None or stat.exiting else None
        self._seen = ObservedRank(
            marks,
            unchanged_s=before.unchanged_s + awake_s if marks.sequence == before.marks.sequence else 0.0,
            still_s=before.still_s + awake_s if marks.pulse == before.marks.pulse else 0.0,
            stopped=stat is not None and stat.state in "Tt",
            gone_s=gone_s if before.gone_s is None else before.gone_s + awake_s,
        )
        return self._seen

    def finished_step(self) -> int:
        """By its mark now, which outlives the process; 0 without one. Raises: ValueError after `close`."""
        marks = self._reader.read()
        return marks.mark.finished_step if marks is not None else 0

    def close(self) -> None:
        os.close(self._descriptor)
        self._reader.close()

    def kill(self) -> None:
        """A stopped process is ended, too."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


@dataclass(eq=False)
class RankMonitor:
    """Checks the workers at each turn, until the last one has ended."""

    folder: str
    facts: MonitoredHost
    _: KW_ONLY
    find: Callable[[str, int], LiveWorker] = LiveWorker
    record: Callable[[Hang, str], None]  # stores an event and its stacks; may take long
    survivor_s: float = SURVIVOR_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last_s = self._began_s = self.clock()
        self._workers: dict[int, LiveWorker] = {}
        self._ended: set[int] = set()
        self._vanished: set[int] = set()  # ranks that ended without a mark: another process may soon have their pid
        self._threads: list[threading.Thread] = []
        self._finished_step = 0  # the newest one of any worker, as far as seen
        self.reasons: list[tuple[Reason, bool]] = []  # why workers are killed, and whether a reason of their own counts more

    def run(self) -> None:
        while self.turn():
            time.sleep(TURN_S)
        deadline = self.clock() + self.facts.close_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self.clock()))
        for worker in self._workers.values():
            worker.close()

    def finished_step(self) -> int:
        """The newest step that any worker has finished by its mark, read now, also of one that has just been killed: the last
        turn may be two steps behind. From any thread."""
        newest = self._finished_step
        for worker in tuple(self._workers.values()):
            with suppress(ValueError):
                newest = max(newest, worker.finished_step())
        return newest

    def turn(self) -> bool:
        """Check once, and act; whether a worker is left to watch."""
        now_s = self.clock()
        awake_s, self._last_s = min(now_s - self._last_s, _LONGEST_TURN_S), now_s
        looks = self._look(awake_s)
        seen = [one for one in looks if one is not None]
        self._finished_step = max(self._finished_step, *(one.marks.mark.finished_step for one in seen), 0)
        decisions = [one for one in judge(seen, survivor_s=self.survivor_s) if one.seen.marks.rank not in self._ended]
        if decisions:
            self._carry_out(decisions, seen)
        if not self._workers:
            return now_s - self._began_s < _NOBODY_S
        return any(one is None or (one.gone_s is None and not one.marks.closed) for one in looks)

    def _look(self, awake_s: float) -> list[ObservedRank | None]:
        looks = []
        for rank in self.facts.ranks:
            if rank not in self._workers and rank not in self._vanished:
                with suppress(OSError, ValueError):
                    self._workers[rank] = self.find(self.folder, rank)
            if rank in self._workers:
                try:
                    looks.append(self._workers[rank].look(awake_s))
                except ProcessLookupError:
                    self._workers.pop(rank).close()
                    self._vanished.add(rank)
        return looks

    def _carry_out(self, decisions: Sequence[KillDecision], seen: Sequence[ObservedRank]) -> None:
        alive = [one.marks for one in seen if one.gone_s is None]
        ended = {one.seen.marks.rank for one in decisions}
        waiting = [marks for marks in alive if marks.rank not in ended]
        hanging = [one for one in decisions if one.hangs]
        text = describe(decisions, waiting, host=self.facts.host)
        stacks = take_stacks(self.folder, [(marks.rank, marks.pid) for marks in alive]) if hanging else ""
        for one in decisions:
            marks = one.seen.marks
            reason = Reason(marks.rank, EXIT_TRANSPORT, str(marks.mark.phase), marks.mark.step, text, guilty=one.hangs)
            # A process that ends by itself may have left its reason, and is only slow.
            self.reasons.append((reason, marks.ending or marks.mark.phase is Phase.END))
            self._ended.add(marks.rank)
            self._workers[marks.rank].kill()
        if hanging:
            at_fault = [one.seen.marks.rank for one in hanging]
            others = tuple(self._status(marks, 0.0, 0.0) for marks in alive if marks.rank not in at_fault)
            guilty = tuple(self._status(one.seen.marks, one.silent_s, one.bound_s) for one in hanging)
            event = HangDiagnosis(hanging[0].kind, guilty, others).event(text, stacks=None)
            # Storage may be what hangs.
            self._start(lambda: self.record(event, stacks))
        # Last, and not by this thread: the terminal's reader may be stopped, and the other workers must be watched.
        self._start(lambda: _tell(f"elastictrain: {text}\n{stacks}")).join(_TELL_S)

    def _status(self, marks: RankProgress, silent_s: float, bound_s: float) -> RankStatus:
        return RankStatus(marks.rank, self.facts.host, marks.mark, silent_s, bound_s)

    def _start(self, act: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread


def describe(decisions: Sequence[KillDecision], waiting: Sequence[RankProgress], *, host: str) -> str:
    """The sentence for reasons, event and terminal. `waiting`: other live ranks of the host, named only in a hang. Pure."""
    text = "; ".join(f"rank {one.seen.marks.rank} on {host} {one}" for one in decisions)
    if any(one.hangs for one in decisions):
        text = f"hang: {text}"
        if waiting:
            places = ", ".join(f"rank {marks.rank} in {marks.mark}" for marks in waiting[:8])
            more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
            text += f". Of this host there are besides {places}{more}"
    return f"{text}. {'They are' if len(decisions) > 1 else 'It is'} ended from outside, so that the group can start again"


def _tell(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
