"""A process's part in the generations of a run, whoever has written the loop that trains in it: it meets the other ranks,
leaves when the generation ends, and waits for a rank in the next one."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.group import await_all, leave
from elastictrain.distributed.reattach import detach
from elastictrain.errors import EXIT_STOPPED, EXIT_TRANSPORT, TransportError
from elastictrain.fault.launcher_channel import Attached, Detached, Introduced, LauncherChannel, tell_launcher
from elastictrain.fault.stop import StopListener
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Overdue, Watchdog
from elastictrain.preflight.transport.settings import OWN_VARIABLES
from elastictrain.telemetry.log import LogPrefix
from elastictrain.train.bringup import form_group, meet
from elastictrain.train.context import TrainContext
from elastictrain.train.exit_report import ExitReport, Reported
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.snapshot_memory import start_saver

logger = logging.getLogger(__name__)

_AGAIN_S = 0.02
_FREE_S = 5.0  # by then a main thread whose groups were aborted must have left the generation, or this process ends
_DETACH_S = 2.0  # limit for aborting the groups; the launcher ends a worker that takes longer


@dataclass(frozen=True, slots=True)
class OrderlyEnd:
    """How a loop has ended that was not interrupted."""

    code: int
    reason: str
    finished: bool  # whether the run is complete
    keep: Callable[[], None]  # ends the loop, and keeps what the next one in this process can use
    free: Callable[[], None]  # as in `Participant.leave`


@dataclass(slots=True)
class Participant:
    """The main thread joins a generation, leaves it and waits; the watchdog and the channel's thread call what ends it."""

    config: RunConfig
    identity: Identity
    tracker: ProgressTracker
    prefix: LogPrefix
    stop: StopListener
    parent: int  # the process that started this one
    channel: LauncherChannel | None  # None: this process ends with its generation
    interrupt: Callable[[], None] = lambda: None  # frees the main thread from what is no collective; any thread calls it
    stays: bool = True  # whether this process can take part in the next generation; otherwise it ends when it is told to detach
    report: ExitReport = field(init=False)  # of the present generation
    link: SaverLink | None = field(default=None, init=False)  # likewise
    _left: threading.Event = field(default_factory=threading.Event, init=False)  # whether the main thread has raised
    _limit: threading.Timer | None = field(default=None, init=False)  # of what is left since `announce`
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

    def make_watchdog(self) -> Watchdog:
        """It judges this process once it is started."""
        return Watchdog(
            self.config.fault,
            mark=lambda: self.tracker.mark,
            stop=lambda: self.stop.request,
            end=self.end,
            # Each generation has a report of its own.
            others=lambda: self.report.hangs.others(),  # noqa: PLW0108
            beat=lambda: self.report.hangs.beat(),  # noqa: PLW0108
        )

    @property
    def keeps_process(self) -> bool:
        """Whether this process may take part in several generations."""
        return self.channel is not None and self.stays

    @property
    def told_to_leave(self) -> bool:
        """Whether the launcher has ended the generation."""
        return self.channel is not None and self.channel.detach_reason is not None

    def check_attached(self) -> None:
        """Raises: DetachedError if the launcher has ended the generation."""
        if self.channel is not None:
            self.channel.check_attached()

    def join(self, context: TrainContext) -> SaverLink | None:
        """Meet the other ranks, and make and check the groups; returns the link to the saver of this host, which starts
        meanwhile. Collective: yes."""
        report, identity = self.report, self.identity
        tell_launcher(identity, Introduced())
        self._left.clear()
        if self.channel is not None:
            self.channel.on_detach(self._abort if self.stays else self._give_up)
        meet(context, parent=self.parent, on_lost=report.lease_lost)
        report.context = context
        self.prefix.incarnation = context.generation.name
        report.hangs.begin(context)
        # The process that would restart this worker; the launcher's process from which it forks may be replaced.
        agent = self.parent if identity.launched else os.getpid()
        # It starts while the group is made and checked.
        self.link = start_saver(context, agent=identity.launcher.pid if identity.launcher is not None else agent)
        form_group(context)
        tell_launcher(identity, Attached(os.environ.get(OWN_VARIABLES, "")))
        report.hangs.group_formed(context.backend, self.link)
        return self.link

    def finish(self, context: TrainContext, loop: Reported, end: OrderlyEnd) -> bool:
        """Report an end in order, and leave the groups once no rank needs another one; returns whether this process can wait
        for a rank in the next generation, as after a stop under a launcher. Collective: yes."""
        report, channel, stays = self.report, self.channel, end.code == EXIT_STOPPED and self.keeps_process
        report.in_order(context, loop, code=end.code, reason=end.reason)
        if stays:
            end.keep()
            loop.abandon()
        else:
            loop.close(finished=end.finished)
        context.heartbeats.close()
        # Closed only after the last collective of the ranks, which may fail and must be recorded then.
        context.journal.flush()
        if stays and channel is not None:
            await_all(context.group)
            self._left.set()
            channel.on_detach(None)
            self._free(end.free)
        else:
            leave(context.group)
        report.hangs.close()
        context.journal.close()
        return stays

    def may_stay(self, error: Exception) -> bool:
        """Whether this process can go on in the next generation, though the present one has failed."""
        if not self.keeps_process:
            return False
        return self.told_to_leave or self.report.classify(error).exit_code == EXIT_TRANSPORT

    def leave(self, error: Exception, context: TrainContext, *, free: Callable[[], None]) -> int:
        """Leave a generation that has failed; returns the exit code with which this process would have ended. `free` is called
        once the groups are aborted: it clears what the step has left, and may `announce` before. Raises: TransportError if a
        part of the generation cannot be ended."""
        self._left.set()
        failure = self.report.detached(error)
        self.tracker.set_phase(Phase.DETACH, step=self.tracker.mark.step)
        if self.channel is not None:
            self.channel.on_detach(None)
        try:
            self._free(free)
        finally:
            if self._limit is not None:
                self._limit.cancel()
        if self.link is not None:
            self.link.close()
        self.report.close_generation(context, failure)
        return failure.exit_code

    def wait(self, exit_code: int, *, built: bool) -> bool:
        """Wait for a rank in the next generation, and adopt it; False if the launcher has ended."""
        assert self.channel is not None  # noqa: S101
        self.tracker.set_phase(Phase.STANDBY)
        if self._limit is None:
            tell_launcher(self.identity, Detached(exit_code, built))
        self._limit = None  # with it `announce` has told it
        environment = self.channel.wait()
        if environment is None:
            return False
        self._adopt(environment)
        return True

    def announce(self, *, built: bool) -> None:
        """While this process leaves a generation: tell the launcher now that it waits for a rank. What is left to do then may
        take `_DETACH_S`, or this process ends."""
        self._limit = threading.Timer(_DETACH_S, self._give_up)
        self._limit.daemon = True
        self._limit.start()
        tell_launcher(self.identity, Detached(EXIT_TRANSPORT, built))

    def _adopt(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        identity = self.identity = read_identity(os.environ)
        self.tracker.begin_generation()
        self.stop.renew(quiet=identity.local_rank > 0)
        self.prefix.rank = identity.rank
        with suppress(OSError):
            Path("/proc/self/comm").write_text(f"rank {identity.rank}")
        self.report, self._ending_s = self._begin_report(), None

    def _begin_report(self) -> ExitReport:
        hangs = HangWatch(self.config, self.identity, self.tracker)
        return ExitReport(self.config, self.identity, self.tracker, hangs, lambda: self.stop.request)

    def _give_up(self) -> None:
        """The generation has ended, and this process with it; called by another thread."""
        assert self.channel is not None  # noqa: S101
        self.report.end_process(self.channel.detach_reason or "the generation has ended", exit_code=EXIT_TRANSPORT)

    def _abort(self) -> None:
        """Free the main thread from what it waits for in this generation; called by another thread."""
        try:
            self.interrupt()
        except Exception:
            # The main thread may still leave without it.
            logger.exception("the step could not be interrupted")
        until_s = time.monotonic() + _DETACH_S
        # Groups that the main thread is making at this moment can be aborted a moment later.
        while not self._left.is_set() and time.monotonic() < until_s:
            with suppress(Exception):  # the main thread gets it, too
                detach(_DETACH_S)
            self._left.wait(_AGAIN_S)

    def _free(self, free: Callable[[], None]) -> None:
        """Abort the groups, and keep what is built. Raises: TransportError if a part of the generation cannot be ended."""
        try:
            detach(_DETACH_S)
            free()
        except Exception as trouble:
            raise TransportError(f"the generation has ended, and this process cannot leave it: {trouble}") from trouble
