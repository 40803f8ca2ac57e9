"""One worker's life: start, agree, build, restore, train, end; and what it says when it cannot go on."""

import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.distributed.group import flight_recorder, leave
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_STOPPED, EXIT_TRANSPORT, StopRequestedError
from elastictrain.events import Failure, Journal, Stop
from elastictrain.fault.exits import follow_parent, limit_the_end
from elastictrain.fault.reasons import (
    TURN_S,
    ExitClassification,
    Reason,
    classify_exit,
    describe_heard,
    elect_reporter,
    leave_reason,
)
from elastictrain.fault.stop import STOP_FILE_VARIABLE, StopListener
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressMark, ProgressTracker
from elastictrain.liveness.watchdog import LostPeer, Others, Overdue, Watchdog
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.telemetry.log import LogPrefix, set_up_logging
from elastictrain.train.bringup import form_group, meet_ranks
from elastictrain.train.build import build
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import show_sample
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.loop import Loop
from elastictrain.train.saving import describe
from elastictrain.train.snapshot_memory import start_saver

_FLIGHT_RECORDER_LIMIT_S = 3.0
_LEAST_END_S = 1.0


class Worker:
    """Runs one configuration in this process. All that is global to a process is touched here and in run.py."""

    def __init__(self, config: RunConfig, identity: Identity, *, parent: int) -> None:
        """`parent` is the process that started this one, read before anything else was done."""
        self._config = config
        self._identity = identity
        self._parent = parent
        self._began_s = time.monotonic()
        self._tracker = ProgressTracker()
        self._hangs = HangWatch(config, identity, self._tracker)
        self._stop = StopListener(notice_s=config.fault.notice_s, stop_file=os.environ.get(STOP_FILE_VARIABLE))
        self._watchdog = Watchdog(
            config.fault,
            mark=lambda: self._tracker.mark,
            stop=lambda: self._stop.request,
            end=self._end_overdue,
            others=lambda: Others(self._lost_peer(), self._hangs.in_vain),
            beat=self._hangs.beat,
        )
        self._prefix = LogPrefix(identity.rank, step=lambda: self._tracker.mark.step)
        self._ending = threading.Lock()
        self._context: TrainContext | None = None
        self._loop: Loop | None = None
        self._link: SaverLink | None = None
        self._backend = ""

    def run(self) -> int:
        """Train to the end; returns the exit code."""
        set_up_logging(self._prefix)
        torch.set_num_threads(self._config.run.num_threads)
        if self._config.run.deterministic:
            # cuBLAS picks among algorithms at run time unless its workspace has a fixed size; read when CUDA starts.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if self._identity.local_rank > 0:
            self._stop.quiet()
        self._stop.start()
        if self._identity.launched and not follow_parent(self._parent):
            return EXIT_STOPPED
        self._watchdog.start()
        code = EXIT_BUG
        try:
            code = self._train()
        except BaseException as error:  # noqa: BLE001  # the edge of the process: everything that ends it is accounted for
            code = self._end_failed(error)
        finally:
            if self._context is not None and self._context.lease is not None:
                # A restart after a failure is still the same owner.
                self._context.lease.close(give_back=code in (EXIT_OK, EXIT_STOPPED))
            # The stop listener stays: a SIGTERM while this process leaves must not change its exit code.
            self._watchdog.close()
        return code

    def _train(self) -> int:
        context = meet_ranks(
            self._config,
            self._identity,
            tracker=self._tracker,
            stop_request=lambda: self._stop.request,
            parent=self._parent,
            on_lost=self._end_without_lease,
        )
        # From now on failures can be recorded.
        self._context = context
        self._prefix.incarnation = context.generation.name
        self._hangs.begin(context)
        form_group(context)
        self._backend = context.backend
        self._link = start_saver(context, agent=self._starter())
        loop = self._loop = build(context, self._link)
        code, reason = EXIT_OK, "done"
        try:
            loop.run()
            self._tracker.set_phase(Phase.EVAL, step=loop.state.step)
            show_sample(context, loop.stepper.wrapped, print_line=loop.observer.print_line)
        except StopRequestedError as error:
            code, reason = EXIT_STOPPED, str(error)
        self._tracker.set_phase(Phase.END, step=loop.state.step)
        self._end_in_order(context, loop, code=code, reason=reason)
        leave(context.group)
        self._hangs.close()
        context.journal.close()
        return code

    def _starter(self) -> int:
        """The process that would start this worker again."""
        if self._identity.launcher is not None:
            # Our launcher starts another torchrun each time.
            return self._identity.launcher.pid
        return self._parent if self._identity.launched else os.getpid()

    def _end_in_order(self, context: TrainContext, loop: Loop, *, code: int, reason: str) -> None:
        step, reached = loop.state.step, loop.reached
        # Told before anything is closed: storage that is slow may keep us from coming back.
        self._tell_launcher(code, reason, step=reached.step if reached.tier != "nothing" else 0)
        if code == EXIT_STOPPED:
            self._limit_stop()
        if self._identity.is_log_rank:
            seconds, saved = time.monotonic() - self._began_s, reached.tier
            context.journal.record(
                Stop(step=step, reason=reason, exit_code=code, seconds=seconds, saved=saved, saved_step=reached.step)
            )
        if self._identity.is_log_rank and code == EXIT_STOPPED:
            where = describe(reached, step=step, run_dir=self._config.run.dir, several_hosts=not self._identity.only_host)
            # Through the observer: on a terminal there is a bar to keep whole.
            loop.observer.print_line(
                f"elastictrain: stopped on request ({reason}) after step {step}{where}; the same command continues from there"
            )
        loop.close(finished=code == EXIT_OK)
        context.heartbeats.close()
        # Closed only after the last meeting of the ranks, which may fail and has to be recorded then.
        context.journal.flush()

    def _limit_stop(self) -> None:
        """What is left to do is not worth being killed over."""
        request = self._stop.request
        if request is not None and request.deadline_s is not None:
            left_s = request.deadline_s - time.monotonic()
            limit_the_end(max(_LEAST_END_S, min(self._config.fault.shutdown_grace_s, left_s)), exit_code=EXIT_STOPPED)

    def _begin_end(self, exit_code: int) -> None:
        """Reporting goes through stores and devices that may be what failed: it must not keep a dead worker alive."""
        limit_the_end(self._config.fault.shutdown_grace_s, exit_code=exit_code)
        self._hangs.announce_ending()

    def _end_failed(self, error: BaseException) -> int:
        mark = self._tracker.mark
        classify = partial(classify_exit, error, where=str(mark), in_collective=mark.in_collective)
        # The limit takes the watchdog's place, and keeps the exit code.
        self._begin_end(classify(last_heard={}).exit_code)
        self._watchdog.close()
        heard = self._last_heard()
        what = classify(last_heard=heard)
        if what.alone:
            self._hangs.tell_others()
        self._report(what, heard=heard, stack="".join(traceback.format_exception(error)) if what.show_stack else "")
        return what.exit_code

    def _end_overdue(self, overdue: Overdue) -> None:
        """From the watchdog's thread, while the main thread is stuck: say why, and end the process."""
        self._begin_end(overdue.exit_code)
        try:
            accusation = self._hangs.accuse(overdue)
            if overdue.exit_code == EXIT_TRANSPORT:
                self._hangs.tell_others()
            heard = self._last_heard()
            sentence = f"{overdue.reason}{accusation}{describe_heard(heard)}"
            what = ExitClassification(overdue.exit_code, sentence, show_stack=overdue.show_stacks)
            # Without stacks: another rank is gone, or training had not begun. Nothing is to be learnt here.
            brief = not overdue.show_stacks
            self._report(what, heard=heard, stack="" if brief else _all_stacks(), brief=brief)
        finally:
            os._exit(overdue.exit_code)

    def _end_without_lease(self, sentence: str) -> None:
        """From the lease's thread: another run trains here, so that nothing that is done from now on counts."""
        self._begin_end(EXIT_STOPPED)
        try:
            self._report(ExitClassification(EXIT_STOPPED, sentence, show_stack=False), heard={}, brief=True)
        finally:
            os._exit(EXIT_STOPPED)

    def _lost_peer(self) -> LostPeer | None:
        lost = self._link.lost if self._link is not None else None
        peer = LostPeer(f"rank {lost[0]} of this host", lost[1]) if lost is not None else self._hangs.failed_peer
        # NCCL never notices.
        return replace(peer, noticed=self._backend != "nccl") if peer is not None else None

    def _report(self, what: ExitClassification, *, heard: Mapping[str, str], stack: str = "", brief: bool = False) -> None:
        """`brief`: what ended this rank is told elsewhere, and others wait for its end. Then nothing waits for a disk or
        asks a device whose peer is being torn down, and which may not answer any more."""
        with self._ending:
            mark = self._announce(what, stack=stack)
            context, limit_s = self._context, self._config.fault.shutdown_grace_s / 2
            if context is None:
                return
            journal, store, trace = context.journal, context.store, self._hangs.trace
            expected = trace is not None if brief else self._config.fault.flight_recorder_entries > 0
            key = f"flight/{context.generation.name}-r{self._identity.rank:05d}.json"
            failure = Failure(
                exit_code=what.exit_code,
                error=what.sentence,
                phase=str(mark.phase),
                step=mark.step,
                last_heard=heard,
                flight_recorder=key if expected else None,
            )
            if brief:
                within(limit_s, lambda: _record_last(journal, failure, end=journal.flush))
                within(_FLIGHT_RECORDER_LIMIT_S, lambda: _store_trace(without_sync(store), key, trace))
                return
            self._hangs.keep_record()
            # The main thread may hang in this very journal, since storage does.
            within(limit_s, lambda: _record_last(journal, failure, end=journal.close))
            # In a hang the library may not answer any more: then what it said before is what there is.
            trace = trace or within(_FLIGHT_RECORDER_LIMIT_S / 2, flight_recorder)
            within(_FLIGHT_RECORDER_LIMIT_S, lambda: _store_trace(store, key, trace))
            if self._loop is not None:
                within(limit_s, self._loop.abandon)

    def _announce(self, what: ExitClassification, *, stack: str) -> ProgressMark:
        """Tell the person at the terminal, and the launcher; returns where this rank is."""
        if self._is_reporter(what):
            sys.stderr.write(f"elastictrain: rank {self._identity.rank} on {self._identity.host}: {what.sentence}\n{stack}")
            sys.stderr.flush()
        mark = self._tracker.mark
        # A stop is told with what was saved, which the launcher stays for; who reports it here has saved nothing.
        self._tell_launcher(what.exit_code, what.sentence, step=0 if what.exit_code == EXIT_STOPPED else mark.step)
        return mark

    def _tell_launcher(self, exit_code: int, sentence: str, *, step: int) -> None:
        launcher, mark = self._identity.launcher, self._tracker.mark
        if launcher is not None:
            leave_reason(launcher.folder, Reason(self._identity.rank, exit_code, str(mark.phase), step, sentence))

    def _is_reporter(self, what: ExitClassification) -> bool:
        """What is wrong for all ranks alike is said once per host; what ends one rank, by that rank."""
        local_rank = self._identity.local_rank
        if what.exit_code == EXIT_STOPPED:
            return local_rank == 0
        if what.show_stack or what.alone or what.exit_code == EXIT_TRANSPORT:
            return True
        limit_s = min(TURN_S, self._config.fault.shutdown_grace_s / 2)
        return elect_reporter(local_rank, ending=lambda: self._stop.request is not None, limit_s=limit_s)

    def _last_heard(self) -> dict[str, str]:
        return self._context.heartbeats.last_heard() if self._context is not None else {}


def _record_last(journal: Journal, failure: Failure, *, end: Callable[[], None]) -> None:
    journal.record(failure)
    end()


def _store_trace(store: Store, key: str, trace: str | None) -> None:
    if trace is not None:
        store.write(key, trace.encode())


def _all_stacks() -> str:
    """The Python stacks of all threads."""
    # faulthandler writes to a descriptor only, so a file has to stand in between.
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
