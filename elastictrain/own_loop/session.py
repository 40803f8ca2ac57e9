"""This process's part in a run whose loop a user has written: signals, heartbeats, watchdog, the lease, and how the process
ends. The trainer's counterpart is `train.worker`."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.data.samples import SampleReader
from elastictrain.distributed.group import leave
from elastictrain.entry_point import leave_process
from elastictrain.errors import EXIT_STOPPED, ConfigError, ElasticTrainError, Problem, StopRequestedError, UsageError
from elastictrain.fault.exits import follow_parent, wait_for_previous_workers
from elastictrain.fault.stop import StopListener
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Watchdog
from elastictrain.own_loop.options import own_config
from elastictrain.run import complain
from elastictrain.storage.opening import open_store
from elastictrain.telemetry.log import LogPrefix, WorkerHandler
from elastictrain.telemetry.loggers import make_loggers
from elastictrain.train.bringup import form_group, meet
from elastictrain.train.checks import check_run_folder, choose_backend, set_determinism, signing_key
from elastictrain.train.context import Samples, TrainContext
from elastictrain.train.exit_report import ExitReport, Reported
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.parameters import seed_everything
from elastictrain.train.snapshot_memory import start_saver
from elastictrain.train.task import Task


@dataclass(slots=True)
class Session:
    """Begins with `init_process_group`, and ends with `end`, or with an exception that nobody catches."""

    context: TrainContext
    report: ExitReport
    watchdog: Watchdog
    stop: StopListener
    link: SaverLink | None = None
    attached: bool = False
    ended: bool = False
    step_seed: int | None = None

    def seed(self) -> None:
        """Random numbers from here on are those of the beginning of a step."""
        if self.step_seed is not None:
            seed_everything(self.step_seed)

    def end(self, loop: Reported, *, code: int, reason: str, finished: bool) -> None:
        """The loop has ended in order; nothing is left of this session. Collective: yes."""
        context, report = self.context, self.report
        report.in_order(context, loop, code=code, reason=reason)
        loop.close(finished=finished)
        context.heartbeats.close()
        context.journal.flush()
        leave(context.group)
        report.hangs.close()
        context.journal.close()
        if context.lease is not None:
            context.lease.close(give_back=True)
        self.watchdog.close()
        self.stop.close()
        self.ended = True
        if isinstance(sys.excepthook, _Hook):
            sys.excepthook = sys.excepthook.previous

    def fail(self, error: BaseException) -> int:
        """Report why this process ends; returns its exit code."""
        code = EXIT_STOPPED
        try:
            code = self.report.failed(error, bounded=self.watchdog.close)
        finally:
            if self.context.lease is not None:
                self.context.lease.close(give_back=code == EXIT_STOPPED)
        return code


@dataclass(slots=True)
class _Hook:
    """Ends the process after an exception that nobody has caught, with a sentence and an exit code that launchers know."""

    previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]
    identity: Identity | None = None
    session: Session | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.session is not None:
            leave_process(self.session.fail(error))
        if isinstance(error, ElasticTrainError):
            leave_process(complain(error, self.identity))
        self.previous(kind, error, trace)


_present: Session | None = None  # of this process


def init_process_group(url: str, **options: Mapping[str, Any]) -> torch.device:
    """Call this in the place of `torch.distributed.init_process_group`: the ranks meet, check hosts and links (the preflight),
    and make the default process group, with limits for what hangs. torch's own function finds addresses of dead processes
    after torchrun has restarted the workers. Returns this rank's device; it is torch's current one.

    `url` and `options`: as for `attach`, which then takes no options. Collective: yes. Raises: ElasticTrainError."""
    global _present  # noqa: PLW0603  # like the process group, there is one
    hook = report_exceptions()
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("elastictrain.init_process_group and attach must be called in the main thread, which handles signals")
    if present_session() is not None or dist.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        message = "must be called once, and in the place of torch.distributed.init_process_group, but there is a process group"
        raise ConfigError([Problem("elastictrain.init_process_group", message)])
    _present = _begin(own_config(url, options), hook)
    return _present.context.group.device


def report_exceptions() -> _Hook:
    """From now on an exception that nobody catches ends the process with a sentence."""
    before = sys.excepthook
    hook = sys.excepthook = _Hook(before.previous if isinstance(before, _Hook) else before)
    return hook


def present_session() -> Session | None:
    return _present if _present is not None and not _present.ended else None


def _begin(config: RunConfig, hook: _Hook) -> Session:
    parent = os.getppid()
    identity = hook.identity = read_identity(os.environ)
    tracker = ProgressTracker()
    prefix = LogPrefix(identity.rank, step=lambda: tracker.mark.step)
    _log_own_messages(prefix)
    set_determinism(config)
    stop = StopListener(notice_s=config.fault.notice_s, stop_file=None)
    stop.quiet = identity.local_rank > 0
    stop.start()
    if identity.launched and not follow_parent(parent):
        raise StopRequestedError("torchrun has ended")
    hangs = HangWatch(config, identity, tracker)
    report = ExitReport(config, identity, tracker, hangs, lambda: stop.request)
    watchdog = Watchdog(
        config.fault,
        mark=lambda: tracker.mark,
        stop=lambda: stop.request,
        end=report.overdue,
        others=hangs.others,
        beat=hangs.beat,
    )
    signing_key(config)
    make_loggers(config.telemetry.loggers)
    backend, store, no_task = choose_backend(config, identity), open_store(config.run.dir), cast(Task, None)
    if identity.local_rank == 0:
        check_run_folder(store, config, task=no_task)
    samples = Samples(SampleReader(()), None, "")
    context = TrainContext(config, identity, tracker, lambda: stop.request, lambda: None, backend, no_task, samples, store)
    watchdog.start()
    session = hook.session = Session(context, report, watchdog, stop)
    wait_for_previous_workers(identity, poll=context.leave_if_asked)
    meet(context, parent=parent, on_lost=report.lease_lost)
    report.context = context
    prefix.incarnation = context.generation.name
    hangs.begin(context)
    session.link = start_saver(context, agent=parent if identity.launched else os.getpid())
    form_group(context)
    hangs.group_formed(backend, session.link)
    # torch has put its own in front, which would capture what is printed.
    sys.excepthook = hook
    tracker.set_phase(Phase.BUILD)
    return session


def _log_own_messages(prefix: LogPrefix) -> None:
    """Show elastictrain's messages; all other logging is the user's."""
    logger = logging.getLogger("elastictrain")
    if not any(isinstance(handler, WorkerHandler) for handler in logger.handlers):
        logger.addHandler(WorkerHandler(sys.stderr, prefix=prefix))
        logger.propagate = False
    logger.setLevel(logging.INFO if prefix.rank == 0 else logging.WARNING)
