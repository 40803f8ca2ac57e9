"""The life of one worker: it takes part in one generation after the other, with what it has built once."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.reattach import forget_step
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_STOPPED, EXIT_UNFIT, StopRequestedError
from elastictrain.fault.launcher_channel import EXACT, open_channel
from elastictrain.fault.stop import StopListener
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.processes import follow_parent
from elastictrain.start_times import StartTimes
from elastictrain.telemetry.log import LogPrefix, set_up_logging
from elastictrain.torch_private_groups import refuse_fsdp
from elastictrain.train.bringup import claim_memory
from elastictrain.train.build import BuiltState, build, detached
from elastictrain.train.checks import check_alone, set_determinism
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import show_sample
from elastictrain.train.loop import Loop
from elastictrain.train.participant import OrderlyEnd, Participant
from elastictrain.train.standby import forget, has_room, prepare
from elastictrain.train.trial import try_task

logger = logging.getLogger(__name__)


def run_worker(config: RunConfig, identity: Identity, *, parent: int, standby: str, times: StartTimes) -> int:
    """Train to the end in this process; returns the exit code. Only this function and run.py touch process-wide settings.
    `parent` is the process that started this one, read before anything else was done. `standby`: the kind of standby, one of
    `fault.launcher_channel`; it waits for its rank, and `identity` is a likely one. Empty: it is none. `times`: those of the
    start so far."""
    tracker = ProgressTracker()
    prefix = LogPrefix(identity.rank, step=lambda: tracker.mark.step)
    set_up_logging(prefix)
    torch.set_num_threads(config.run.num_threads)
    set_determinism(config)
    # Never closed: a SIGTERM while this process ends must not change its exit code.
    stop = StopListener(notice_s=config.fault.notice_s)
    stop.quiet = bool(standby) or identity.local_rank > 0
    stop.start()
    if identity.launched and not follow_parent(parent):
        return EXIT_STOPPED
    part = Participant(config, identity, tracker, prefix, stop, parent, open_channel(identity, stop))
    worker = Worker(part, times)
    watchdog = part.make_watchdog()
    watchdog.start()
    code = EXIT_BUG
    try:
        code = worker.run(standby=standby)
    except BaseException as error:  # noqa: BLE001  the edge of the process: everything that ends it is accounted for
        code = part.report.failed(error, bounded=watchdog.close)
    finally:
        context = part.report.context
        if context is not None and context.lease is not None:
            # A restart after a failure has the same owner, so the lease is kept.
            context.lease.close(give_back=code in (EXIT_OK, EXIT_STOPPED))
        watchdog.close()
    return code


@contextmanager
def _without_collection() -> Iterator[None]:
    """No collection of garbage in the block: of all that is imported and built, it takes as long as a part of a recovery."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(slots=True)
class Worker:
    """This process trains a task in the generations that `part` joins. The main thread calls `run`."""

    part: Participant
    times: StartTimes = field(default_factory=StartTimes)
    checked: TrainContext | None = field(default=None, init=False)  # of the generation before, or of a standby
    built: BuiltState | None = field(default=None, init=False)
    loop: Loop | None = field(default=None, init=False)  # of the present generation

    def __post_init__(self) -> None:
        self.part.interrupt = self._interrupt

    @property
    def has_built(self) -> bool:
        """Whether this process has its part of the model."""
        return self.built is not None and self.built.parked is None

    def run(self, *, standby: str) -> int:
        """Take part in one generation after the other; returns the exit code. Raises: what ends this process."""
        if standby and (code := self._stand_by(exact=standby == EXACT)) is not None:
            return code
        while True:
            try:
                exit_code = self._take_part()
                if exit_code == EXIT_OK or self.part.channel is None:
                    return exit_code
            except Exception as error:
                if self.checked is None or not self.part.may_stay(error):
                    raise
                exit_code = self._leave(error, self.checked)
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
        part, identity = self.part, self.part.identity
        context = check_alone(
            part.config,
            identity,
            tracker=part.tracker,
            stop_request=lambda: part.stop.request,
            check_attached=part.check_attached,
            times=self.times,
        )
        recovers = identity.launcher is not None and identity.launcher.recovery is not None
        if tried and identity.local_rank == 0 and not recovers:
            with context.timed("trial"):
                try_task(context)
        return context

    def _take_part(self) -> int:
        """Take part in a generation to its orderly end; returns the exit code. After a stop under a launcher this process has
        left its groups, and can wait for a rank."""
        part, report, built = self.part, self.part.report, self.built
        context = self.checked = (
            self.checked.for_next(part.identity) if self.checked is not None else self._check_alone(tried=True)
        )
        with nullcontext() if built is None else _without_collection():
            if built is None or built.parked is not None:
                claim_memory(context, parked=built.parked if built is not None else None)
            link = part.join(context)
            loop = self.loop = report.loop = build(context, link, built)
        code, reason = EXIT_OK, "done"
        try:
            loop.run()
            part.tracker.set_phase(Phase.EVAL, step=loop.state.step)
            with loop.averaged():
                show_sample(context, loop.stepper.wrapped, print_line=loop.observer.print_line)
        except StopRequestedError as error:
            code, reason = EXIT_STOPPED, str(error)
        part.tracker.set_phase(Phase.END, step=loop.state.step)
        end = OrderlyEnd(code, reason, finished=code == EXIT_OK, keep=self._keep, free=self._forget_step)
        part.finish(context, loop, end)
        return code

    def _keep(self) -> None:
        if self.loop is not None:
            self.built, self.loop, self.part.report.loop = detached(self.loop), None, None

    def _interrupt(self) -> None:
        # The main thread lets go of it at an orderly end.
        if (loop := self.loop) is not None:
            loop.loader.interrupt()
            refuse_fsdp(loop.stepper.wrapped.bare)

    def _leave(self, error: Exception, context: TrainContext) -> int:
        """Leave the generation; returns the exit code with which this process would have ended. Raises: TransportError."""
        exit_code = self.part.leave(error, context, free=self._free)
        if self.built is None:
            # What was half built is held by cycles of references, and would be built a second time beside it.
            gc.collect()
        return exit_code

    def _free(self) -> None:
        if self.loop is not None:
            self.built = detached(self.loop)
        # The device may have much to do: the others meet meanwhile.
        self.part.announce(built=self.has_built)
        self._forget_step()

    def _forget_step(self) -> None:
        if self.built is not None:
            forget_step(self.built.wrapped.bare)

    def _wait(self, exit_code: int) -> bool:
        """Wait for a rank in the next generation; False if the launcher has ended."""
        part, before = self.part, self.part.identity
        if not part.wait(exit_code, built=self.has_built):
            return False
        set_up_logging(part.prefix)
        now = part.identity
        if (now.world_size, now.local_world_size) != (before.world_size, before.local_world_size):
            # What a standby has built is for a world of one size.
            if self.built is not None and self.built.arena is not None:
                self.built.arena.close()
            self.built = None
        self.loop = None
        return True
