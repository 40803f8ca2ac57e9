"""How a worker ends: its bounded report to the terminal, its launcher, the other ranks and the run folder."""

import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.errors import EXIT_STOPPED, EXIT_TRANSPORT
from elastictrain.events import Failure, Stop
from elastictrain.fault.exits import limit_the_end
from elastictrain.fault.launcher_channel import tell_launcher
from elastictrain.fault.reasons import (
    TURN_S,
    ExitClassification,
    Reason,
    classify_exit,
    describe_heard,
    elect_reporter,
)
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Overdue
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.telemetry.progress import write_above
from elastictrain.torch_private import flight_recorder
from elastictrain.train.context import StopRequested, TrainContext
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.observing import Observer
from elastictrain.train.saving import Reached, describe
from elastictrain.train.state import SavedState

_FLIGHT_RECORDER_LIMIT_S = 3.0
_LEAST_END_S = 1.0


class Reported(Protocol):
    """A loop, as far as its end is reported."""

    @property
    def state(self) -> SavedState: ...

    @property
    def observer(self) -> Observer: ...

    @property
    def reached(self) -> Reached:
        """What the next start can resume from."""

    def close(self, *, finished: bool) -> None:
        """End all that the loop has opened. `finished`: the run is complete."""

    def abandon(self) -> None:
        """The same after a failure."""


@dataclass(slots=True)
class ExitReport:
    """A worker's report, written once: the main thread, the watchdog and the lease thread may each find a reason to end."""

    config: RunConfig
    identity: Identity
    tracker: ProgressTracker
    hangs: HangWatch
    stop_request: StopRequested
    context: TrainContext | None = None  # records go through it, once the ranks have met
    loop: Reported | None = None
    _began_s: float = field(default_factory=time.monotonic, init=False)
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False)

    def in_order(self, context: TrainContext, loop: Reported, *, code: int, reason: str) -> None:
        """Report a run that is complete, or that was stopped and has saved what it could."""
        step, reached, request = loop.state.step, loop.reached, self.stop_request()
        # The launcher is informed before anything is closed: slow storage may keep this process from returning.
        safe = reached.step if reached.tier != "nothing" else 0
        self._tell_launcher(ExitClassification(code, reason, False), step=safe)
        if self.identity.launcher is None and code == EXIT_STOPPED and request is not None and request.deadline_s is not None:
            # The rest of the work is not worth a kill. A launcher ends its own workers at the deadline.
            left_s = min(self.config.fault.shutdown_grace_s, request.deadline_s - time.monotonic())
            limit_the_end(max(_LEAST_END_S, left_s), exit_code=EXIT_STOPPED)
        if self.identity.is_log_rank:
            seconds, saved = time.monotonic() - self._began_s, reached.tier
            context.journal.record(
                Stop(step=step, reason=reason, exit_code=code, seconds=seconds, saved=saved, saved_step=reached.step)
            )
        if self.identity.is_log_rank and code == EXIT_STOPPED:
            where = describe(reached, step=step, run_dir=self.config.run.dir, several_hosts=not self.identity.only_host)
            # The observer prints it without tearing the progress bar.
            loop.observer.print_line(
                f"elastictrain: stopped on request ({reason}) after step {step}{where}; the same command continues from there"
            )

    def failed(self, error: BaseException, *, bounded: Callable[[], None] = lambda: None) -> int:
        """Report an exception; returns the exit code. Calls `bounded` once the report has a limit that keeps this code."""
        self._begin(self._as_asked(self.classify(error)).exit_code)
        bounded()
        heard = self._last_heard()
        what = self._as_asked(self.classify(error, heard))
        if what.alone:
            self.hangs.notify_others()
        self.write(what, heard=heard, stack="".join(traceback.format_exception(error)) if what.show_stack else "")
        return what.exit_code

    def classify(self, error: BaseException, heard: Mapping[str, str] | None = None) -> ExitClassification:
        """What an error means for this process; `heard`: where the other ranks were last."""
        mark = self.tracker.mark
        own, heard = mark.phase is Phase.STEP, heard or {}
        return classify_exit(error, where=str(mark), in_collective=mark.in_collective, last_heard=heard, in_own_loop=own)

    def _as_asked(self, what: ExitClassification) -> ExitClassification:
        """Of a process that ends with its generation: a rank that is asked to stop before a step is done ends by itself, and so
        breaks collectives of the others. If they are asked, too, that is why they end, unless they were to save something."""
        request, mark = self.stop_request(), self.tracker.mark
        if request is None or what.exit_code != EXIT_TRANSPORT or mark.finished_step or mark.phase is Phase.SAVE:
            return what
        return ExitClassification(EXIT_STOPPED, f"asked to stop ({request.reason}), and {what.sentence}", show_stack=False)

    def detached(self, error: Exception) -> Failure:
        """Tell the launcher that this process has left the generation; returns the record for `close_generation`."""
        what = replace(self.classify(error), exit_code=EXIT_TRANSPORT)
        self._tell_launcher(what, step=self.tracker.mark.step)
        self.hangs.close_monitor()
        return self._failure(what, {})

    def close_generation(self, context: TrainContext, failure: Failure) -> None:
        """Record the failure and close what the generation has opened, in a thread: storage is not waited for. `context` may be
        incomplete."""

        def close() -> None:
            """Passes over what an incomplete context lacks. Heartbeats end before storage is written to."""
            if (heartbeats := getattr(context, "heartbeats", None)) is not None:
                heartbeats.close()
            if (journal := getattr(context, "journal", None)) is not None:
                journal.record(failure)
                journal.close()
            if self.loop is not None:
                self.loop.abandon()
            self.hangs.close_peers()

        threading.Thread(target=close, name="close-generation", daemon=True).start()

    def overdue(self, overdue: Overdue) -> None:
        """Called by the watchdog's thread while the main thread is stuck: report, and end the process."""
        self._begin(overdue.exit_code)
        try:
            accusation, guilty = self.hangs.name_culprits(overdue), overdue.hangs and self.hangs.holds_others_up
            if overdue.exit_code == EXIT_TRANSPORT:
                self.hangs.notify_others()
            heard = self._last_heard()
            sentence = f"{overdue.reason}{accusation}{describe_heard(heard)}"
            what = ExitClassification(overdue.exit_code, sentence, show_stack=overdue.show_stacks, guilty=guilty)
            stack = ""
            # Another rank was lost, or training had not begun: the stacks of this rank would show nothing new.
            if overdue.show_stacks:
                # faulthandler writes to a file descriptor only, hence the file.
                with tempfile.TemporaryFile("w+") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                    file.seek(0)
                    stack = file.read()
            self.write(what, heard=heard, stack=stack, brief=not overdue.show_stacks)
        finally:
            os._exit(overdue.exit_code)

    def lease_lost(self, sentence: str) -> None:
        """Called by the lease thread: another run trains here, so this run's further work does not count."""
        self.end_process(sentence, exit_code=EXIT_STOPPED)

    def end_process(self, sentence: str, *, exit_code: int) -> None:
        """Called by another thread than the main one: report, and end the process."""
        self._begin(exit_code)
        try:
            self.write(ExitClassification(exit_code, sentence, show_stack=False), heard={}, brief=True)
        finally:
            os._exit(exit_code)

    def write(self, what: ExitClassification, *, heard: Mapping[str, str], stack: str = "", brief: bool = False) -> None:
        """Report why this rank ends. `brief`: another rank reports the cause, and others wait for this rank's end. Then the
        report does not wait for a disk, nor ask a device whose peer is being torn down: it may not answer any more."""
        with self._ending:
            if self._is_reporter(what):
                sentence = f"elastictrain: rank {self.identity.rank} on {self.identity.host}: {what.sentence}"
                write_above(sys.stderr, f"{sentence}\n{stack}".rstrip("\n"))
            # The launcher waits for the saved step of a stop; a rank that reports the stop here has saved nothing.
            self._tell_launcher(what, step=0 if what.exit_code == EXIT_STOPPED else self.tracker.mark.step)
            context, limit_s = self.context, self.config.fault.shutdown_grace_s / 2
            if context is None:
                return
            journal, store, trace = context.journal, context.store, self.hangs.trace
            expected = trace is not None if brief else self.config.fault.flight_recorder_entries > 0
            key = f"flight/{context.generation.name}-r{self.identity.rank:05d}.json"
            failure = self._failure(what, heard, trace=key if expected else None)

            def record_last(end: Callable[[], None]) -> None:
                journal.record(failure)
                end()

            if brief:
                within(limit_s, lambda: record_last(journal.flush))
                _store_trace(without_sync(store), key, trace)
                return
            self.hangs.keep_record()
            # The main thread may hang in this very journal, since storage does.
            within(limit_s, lambda: record_last(journal.close))
            # In a hang the library may not answer any more; then the earlier trace is used.
            _store_trace(store, key, trace or within(_FLIGHT_RECORDER_LIMIT_S / 2, flight_recorder))
            if self.loop is not None:
                within(limit_s, self.loop.abandon)

    def _begin(self, exit_code: int) -> None:
        """Limit the report: it uses stores and devices that may have failed, and must not keep a dead worker alive."""
        limit_the_end(self.config.fault.shutdown_grace_s, exit_code=exit_code)
        self.hangs.announce_ending()

    def _failure(self, what: ExitClassification, heard: Mapping[str, str], *, trace: str | None = None) -> Failure:
        phase, step = str(self.tracker.mark.phase), self.tracker.mark.step
        return Failure(
            exit_code=what.exit_code, error=what.sentence, phase=phase, step=step, last_heard=heard, flight_recorder=trace
        )

    def _tell_launcher(self, what: ExitClassification, *, step: int) -> None:
        rank, phase = self.identity.rank, str(self.tracker.mark.phase)
        reason = Reason(rank, what.exit_code, phase, step, what.sentence, guilty=what.guilty, missing=what.missing)
        tell_launcher(self.identity, reason)

    def _is_reporter(self, what: ExitClassification) -> bool:
        """One rank per host reports an error that all ranks share; an error of one rank is reported by that rank."""
        local_rank = self.identity.local_rank
        if what.exit_code == EXIT_STOPPED:
            return local_rank == 0
        if what.show_stack or what.alone or what.exit_code == EXIT_TRANSPORT:
            return True
        limit_s = min(TURN_S, self.config.fault.shutdown_grace_s / 2)
        return elect_reporter(local_rank, ending=lambda: self.stop_request() is not None, limit_s=limit_s)

    def _last_heard(self) -> dict[str, str]:
        return self.context.heartbeats.last_heard() if self.context is not None else {}


def _store_trace(store: Store, key: str, trace: str | None) -> None:
    if trace is not None:
        within(_FLIGHT_RECORDER_LIMIT_S, lambda: store.write(key, trace.encode()))
