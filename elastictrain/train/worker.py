"""The life of one worker: it takes part in one generation after the other, with what it has built once."""

import gc
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.group import await_all, leave
from elastictrain.distributed.reattach import detach, forget_step
from elastictrain.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_TRANSPORT,
    EXIT_UNFIT,
    StopRequestedError,
    TransportError,
)
from elastictrain.fault.exits import follow_parent
from elastictrain.fault.launcher_channel import EXACT, Attached, Detached, FromWorker, Introduced, LauncherChannel
from elastictrain.fault.stop import STOP_FILE_VARIABLE, StopListener
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Others, Overdue, Watchdog
from elastictrain.preflight.transport.settings import OWN_VARIABLES
from elastictrain.telemetry.log import LogPrefix, set_up_logging
from elastictrain.train.bringup import claim_memory, form_group, meet
from elastictrain.train.build import BuiltState, build, detached
from elastictrain.train.checks import check_alone, set_determinism
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import show_sample
from elastictrain.train.exit_report import ExitReport
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.loop import Loop
from elastictrain.train.snapshot_memory import start_saver
from elastictrain.train.standby import forget, has_room, prepare
from elastictrain.train.trial import try_task

logger = logging.getLogger(__name__)

_AGAIN_S = 0.02
_FREE_S = 5.0  # by then a main thread whose groups were aborted must have left the generation, or this process ends
_DETACH_S = 2.0  # limit for aborting the groups; the launcher ends a worker that takes longer


def run_worker(config: RunConfig, identity: Identity, *, parent: int, channel: LauncherChannel | None, standby: str) -> int:
    """Train to the end in this process; returns the exit code. Only this function and run.py touch process-wide settings.
    `parent` is the process that started this one, read before anything else was done. `standby`: the kind of standby, one of
    `fault.launcher_channel`; it waits for its rank, and `identity` is a likely one. Empty: it is none."""
    tracker = ProgressTracker()
    prefix = LogPrefix(identity.rank, step=lambda: tracker.mark.step)
    set_up_logging(prefix)
    torch.set_num_threads(config.run.num_threads)
    set_determinism(config)
    # Never closed: a SIGTERM while this process ends must not change its exit code.
    stop = StopListener(notice_s=config.fault.notice_s, stop_file=os.environ.get(STOP_FILE_VARIABLE))
    stop.quiet = bool(standby) or identity.local_rank > 0
    stop.start()
    if identity.launched and not follow_parent(parent):
        return EXIT_STOPPED
    worker = Worker(config, identity, tracker, prefix, stop, parent, channel)
    watchdog = Watchdog(
        config.fault,
        mark=lambda: tracker.mark,
        stop=lambda: stop.request,
        end=worker.end,
        others=worker.others,
        beat=worker.beat,
    )
    watchdog.start()
    code = EXIT_BUG
    try:
        code = worker.run(standby=standby)
    except BaseException as error:  # noqa: BLE001  the edge of the process: everything that ends it is accounted for
        code = worker.report.failed(error, bounded=watchdog.close)
    finally:
        context = worker.report.context
        if context is not None and context.lease is not None:
            # A restart after a failure has the same owner, so the lease is kept.
            context.lease.close(give_back=code in (EXIT_OK, EXIT_STOPPED))
        watchdog.close()
    return code


@dataclass(slots=True)
class Worker:
    """This process's part in the generations of a run. The main thread calls `run`; the watchdog and the channel's thread call
    what ends a generation."""

    config: RunConfig
    identity: Identity
    tracker: ProgressTracker
    prefix: LogPrefix
    stop: StopListener
    parent: int
    channel: LauncherChannel | None
    report: ExitReport = field(init=False)  # of the present generation
    checked: TrainContext | None = field(default=None, init=False)  # of the generation before, or of a standby
    built: BuiltState | None = field(default=None, init=False)
    link: SaverLink | None = field(default=None, init=False)  # of the present generation
    loop: Loop | None = field(default=None, init=False)  # likewise
    _left: threading.Event = field(default_factory=threading.Event, init=False)  # whether the main thread has raised
    _ending_s: float | None = field(default=None, init=False)  # since when the watchdog has it leave the generation

    def __post_init__(self) -> None:
        self.report = self._begin_report()

    def end(self, overdue: Overdue) -> None:
        """Called by the watchdog, again and again: leave the generation if this rank waits for another one in vain, else end
        this process."""
        channel, now_s = self.channel, time.monotonic()
        if channel is None or overdue.exit_code != EXIT_TRANSPORT or not self.report.hangs.waits_for_another(overdue):
            self.report.overdue(overdue)
        elif self._ending_s is None:
            self._ending_s = now_s
            channel.end_generation(f"{overdue.reason}{self.report.hangs.name_culprits(overdue)}")
            self.report.hangs.keep_record()
        elif now_s - self._ending_s > _FREE_S and not self._left.is_set():
            self.report.overdue(overdue)

    def others(self) -> Others:
        """What is known of the other ranks of the present generation."""
        return self.report.hangs.others()

    def beat(self) -> None:
        """Show that threads of this process can run."""
        self.report.hangs.beat()

    def run(self, *, standby: str) -> int:
        """Take part in one generation after the other; returns the exit code. Raises: what ends this process."""
        if standby and (code := self._stand_by(exact=standby == EXACT)) is not None:
            return code
        while True:
            try:
                exit_code = self._take_part()
                if exit_code == EXIT_OK or self.channel is None:
                    return exit_code
            except Exception as error:
                if self.checked is None or not self._may_wait(error):
                    raise
                exit_code = self._detach(error, self.checked)
            if not self._wait(exit_code):
                return exit_code

    def _stand_by(self, *, exact: bool) -> int | None:
        """Prepare what needs no rank, and wait for one; returns an exit code if there is no use for this standby."""
        try:
            self.checked = self._check_alone()
            if exact and not has_room(self.checked):
                return EXIT_OK
            self.built = prepare(self.checked, exact=exact)
        except Exception as error:  # noqa: BLE001  # a rank in its place would find the same, and report it
            logger.warning("a standby could not be prepared: %s", error)
            if self.checked is None:
                return EXIT_UNFIT
        if self.built is None:
            forget()
        return None if self._wait(EXIT_OK) else EXIT_OK

    def _check_alone(self, *, tried: bool = False) -> TrainContext:
        """`tried`: the task is tried too, once per host, unless it has been before a failure."""
        channel, identity = self.channel, self.identity
        context = check_alone(
            self.config,
            self.identity,
            tracker=self.tracker,
            stop_request=lambda: self.stop.request,
            check_attached=channel.check_attached if channel is not None else lambda: None,
        )
        recovers = identity.launcher is not None and identity.launcher.recovery is not None
        if tried and identity.local_rank == 0 and not recovers:
            with context.timed("trial"):
                try_task(context)
        return context

    def _take_part(self) -> int:
        """Take part in a generation to its orderly end; returns the exit code. After a stop under a launcher this process has
        left its groups, and can wait for a rank."""
        report, identity = self.report, self.identity
        context = self.checked = self.checked.for_next(identity) if self.checked is not None else self._check_alone(tried=True)
        if self.built is None or self.built.parked is not None:
            claim_memory(context, parked=self.built.parked if self.built is not None else None)
        self._tell(Introduced())
        self._left.clear()
        if self.channel is not None:
            self.channel.on_detach(self._abort)
        finished = self.built.finished_step if self.built is not None else 0
        meet(context, finished_step=finished, parent=self.parent, on_lost=report.lease_lost)
        report.context = context
        self.prefix.incarnation = context.generation.name
        report.hangs.begin(context, tell=self._tell)
        # The process that would restart this worker; the launcher's process from which it forks may be replaced.
        agent = self.parent if identity.launched else os.getpid()
        # It starts while the group is made and checked.
        link = self.link = start_saver(context, agent=identity.launcher.pid if identity.launcher is not None else agent)
        form_group(context)
        self._tell(Attached(os.environ.get(OWN_VARIABLES, "")))
        report.hangs.group_formed(context.backend, link)
        loop = self.loop = report.loop = build(context, link, self.built)
        code, reason = EXIT_OK, "done"
        try:
            loop.run()
            self.tracker.set_phase(Phase.EVAL, step=loop.state.step)
            show_sample(context, loop.stepper.wrapped, print_line=loop.observer.print_line)
        except StopRequestedError as error:
            code, reason = EXIT_STOPPED, str(error)
        self.tracker.set_phase(Phase.END, step=loop.state.step)
        report.in_order(context, loop, code=code, reason=reason)
        stays = code == EXIT_STOPPED and self.channel is not None
        if stays:
            self.built, self.loop, report.loop = detached(loop), None, None
            loop.abandon()
        else:
            loop.close(finished=code == EXIT_OK)
        context.heartbeats.close()
        # Closed only after the last collective of the ranks, which may fail and must be recorded then.
        context.journal.flush()
        if stays:
            self._leave_in_order(context)
        else:
            leave(context.group)
        report.hangs.close()
        context.journal.close()
        return code

    def _leave_in_order(self, context: TrainContext) -> None:
        """Leave the groups once no rank needs another one. Collective: yes."""
        assert self.channel is not None  # noqa: S101
        await_all(context.group)
        self._left.set()
        self.channel.on_detach(None)
        self._free()

    def _tell(self, message: FromWorker) -> None:
        """Send a message to the launcher, if there is one."""
        if self.channel is not None:
            self.channel.send(message)

    def _abort(self) -> None:
        """Free the main thread from what it waits for in this generation; called by another thread."""
        # The main thread lets go of it at an orderly end.
        if (loop := self.loop) is not None:
            loop.loader.interrupt()
        until_s = time.monotonic() + _DETACH_S
        # Groups that the main thread is making at this moment can be aborted a moment later.
        while not self._left.is_set() and time.monotonic() < until_s:
            with suppress(TimeoutError):
                detach(_DETACH_S)
            self._left.wait(_AGAIN_S)

    def _may_wait(self, error: Exception) -> bool:
        """Whether this process can go on in the next generation, though the present one has failed."""
        if self.channel is None:
            return False
        return self.channel.detach_reason is not None or self.report.classify(error).exit_code == EXIT_TRANSPORT

    def _detach(self, error: Exception, context: TrainContext) -> int:
        """Leave the generation; returns the exit code with which this process would have ended. Raises: TransportError if a
        part of the generation cannot be ended."""
        report, loop = self.report, self.loop
        self._left.set()
        failure = report.detached(error)
        self.tracker.set_phase(Phase.DETACH, step=self.tracker.mark.step)
        if self.channel is not None:
            self.channel.on_detach(None)
        self._free(loop)
        if self.link is not None:
            self.link.close()
        report.close_generation(context, failure)
        if self.built is None:
            # What was half built is held by cycles of references, and would be built a second time beside it.
            gc.collect()
        return failure.exit_code

    def _free(self, loop: Loop | None = None) -> None:
        """Abort the groups, and keep what is built. Raises: TransportError if a part of the generation cannot be ended."""
        try:
            detach(_DETACH_S)
            if loop is not None:
                self.built = detached(loop)
            if self.built is not None:
                forget_step(self.built.wrapped)
        except Exception as trouble:
            raise TransportError(f"the generation has ended, and this process cannot leave it: {trouble}") from trouble

    def _wait(self, exit_code: int) -> bool:
        """Wait for a rank in the next generation; False if the launcher has ended."""
        assert self.channel is not None  # noqa: S101
        self.tracker.set_phase(Phase.STANDBY)
        self.channel.send(Detached(exit_code, self.built is not None and self.built.parked is None))
        environment = self.channel.wait()
        if environment is None:
            return False
        self._adopt(environment)
        return True

    def _adopt(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        before, identity = self.identity, read_identity(os.environ)
        self.identity = identity
        if (identity.world_size, identity.local_world_size) != (before.world_size, before.local_world_size):
            # What a standby has built is for a world of one size.
            if self.built is not None and self.built.arena is not None:
                self.built.arena.close()
            self.built = None
        self.tracker.begin_generation()
        self.stop.renew(os.environ.get(STOP_FILE_VARIABLE), quiet=identity.local_rank > 0)
        self.prefix.rank = identity.rank
        set_up_logging(self.prefix)
        with suppress(OSError):
            Path("/proc/self/comm").write_text(f"rank {identity.rank}")
        self.report, self.loop, self._ending_s = self._begin_report(), None, None

    def _begin_report(self) -> ExitReport:
        hangs = HangWatch(self.config, self.identity, self.tracker)
        return ExitReport(self.config, self.identity, self.tracker, hangs, lambda: self.stop.request)
