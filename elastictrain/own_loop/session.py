"""This process's part in a run whose loop a user has written: signals, heartbeats, watchdog, the lease, and how the process
ends. The trainer's counterpart is `train.worker`."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from elastictrain.checkpoint.signing import signing_key
from elastictrain.config.composed import RunConfig
from elastictrain.data.samples import SampleReader
from elastictrain.distributed.group import lone_group
from elastictrain.distributed.reattach import detach
from elastictrain.entry_point import leave_process
from elastictrain.errors import EXIT_STOPPED, ConfigError, ElasticTrainError, Problem, StopRequestedError, UsageError
from elastictrain.fault.exits import wait_for_previous_workers
from elastictrain.fault.launcher_channel import open_channel
from elastictrain.fault.stop import StopListener
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Watchdog
from elastictrain.own_loop.options import CommandLineOptions, own_config
from elastictrain.processes import follow_parent
from elastictrain.storage.opening import open_store
from elastictrain.telemetry.log import LogPrefix, WorkerHandler
from elastictrain.telemetry.loggers import make_loggers
from elastictrain.train.checks import check_run_folder, choose_backend, set_determinism
from elastictrain.train.context import Samples, TrainContext
from elastictrain.train.exit_report import Reported
from elastictrain.train.parameters import seed_everything
from elastictrain.train.participant import OrderlyEnd, Participant
from elastictrain.train.task import Task

_DETACH_S = 10.0  # for a group that communicates with nobody


@dataclass(slots=True)
class Session:
    """Begins with `init_process_group`, and ends with `end`, or with an exception that nobody catches."""

    context: TrainContext  # of the present generation
    part: Participant
    watchdog: Watchdog
    hook: "_Hook"
    recoverable: bool  # whether nothing communicates before `join`, which is called again in each generation
    attached: bool = False
    joined: bool = False
    ended: bool = False
    step_seed: int | None = None

    def seed(self) -> None:
        """Random numbers from here on are those of the beginning of a step."""
        if self.step_seed is not None:
            seed_everything(self.step_seed)

    def join(self) -> None:
        """Meet the other ranks, and make the groups. Collective: yes."""
        if dist.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
            # The group on which the model was built communicates with nobody.
            detach(_DETACH_S)
        if not self.context.tracker.has_trained:
            wait_for_previous_workers(self.part.identity, poll=self.context.leave_if_asked)
        self.part.join(self.context)
        self.context.await_group()
        # torch has put its own in front, which would capture what is printed.
        sys.excepthook = self.hook
        self.context.tracker.set_phase(Phase.BUILD)
        self.joined = True

    def end(self, loop: Reported, end: OrderlyEnd) -> None:
        """The loop has ended in order. Either nothing is left of this session, or it goes on in the next generation of the run.
        Collective: yes."""
        if self.part.finish(self.context, loop, end):
            self.await_rank(end.code)
            return
        if self.context.lease is not None:
            self.context.lease.close(give_back=True)
        self.watchdog.close()
        self.part.stop.close()
        if self.part.channel is not None:
            # What the program still does is no part of the run.
            self.part.channel.on_stop = lambda _: signal.raise_signal(signal.SIGTERM)
        self.ended = True
        if isinstance(sys.excepthook, _Hook):
            sys.excepthook = sys.excepthook.previous

    def await_rank(self, exit_code: int) -> None:
        """Wait for a rank in the next generation; if there is none, end the process with `exit_code`."""
        if not self.part.wait(exit_code, built=True):
            leave_process(exit_code)
        self.context, self.joined = self.context.for_next(self.part.identity), False

    def fail(self, error: BaseException) -> int:
        """Report why this process ends; returns its exit code."""
        code = EXIT_STOPPED
        try:
            code = self.part.report.failed(error, bounded=self.watchdog.close)
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
            # Not ahead: the fork server runs that module as a program.
            from elastictrain.run import complain

            leave_process(complain(error, self.identity))
        self.previous(kind, error, trace)


command_line = CommandLineOptions()  # that of this process, if it runs a program for a launcher
_present: Session | None = None  # of this process


def init_process_group(url: str, *, recoverable: bool = False, **options: Mapping[str, Any]) -> torch.device:
    """Call this in the place of `torch.distributed.init_process_group`: the ranks meet, check hosts and links (the preflight),
    and make the default process group, with limits for what hangs. torch's own function finds addresses of dead processes
    after torchrun has restarted the workers. Returns this rank's device; it is torch's current one.

    `recoverable`: the loop is a function that `elastictrain.recoverable` decorates. Then the ranks meet in `run.restore()`, and
    until then collectives communicate with nobody: what is built before must not depend on other ranks, as some of them may
    have built it long ago.

    `url` and `options`: as for `attach`, which then takes no options. Collective: yes. Raises: ElasticTrainError."""
    global _present  # noqa: PLW0603  # like the process group, there is one
    hook = report_exceptions()
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("elastictrain.init_process_group and attach must be called in the main thread, which handles signals")
    if present_session() is not None or dist.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        message = "must be called once, and in the place of torch.distributed.init_process_group, but there is a process group"
        raise ConfigError([Problem("elastictrain.init_process_group", message)])
    hook.identity = read_identity(os.environ)
    _present = _begin(own_config(url, options, line=command_line), hook, hook.identity, recoverable=recoverable)
    return _present.context.group.device


def report_exceptions() -> _Hook:
    """From now on an exception that nobody catches ends the process with a sentence."""
    before = sys.excepthook
    hook = sys.excepthook = _Hook(before.previous if isinstance(before, _Hook) else before)
    return hook


def present_session() -> Session | None:
    return _present if _present is not None and not _present.ended else None


def _begin(config: RunConfig, hook: _Hook, identity: Identity, *, recoverable: bool) -> Session:
    parent = os.getppid()
    tracker = ProgressTracker()
    prefix = LogPrefix(identity.rank, step=lambda: tracker.mark.step)
    _log_own_messages(prefix)
    set_determinism(config)
    stop = StopListener(notice_s=config.fault.notice_s)
    stop.quiet = identity.local_rank > 0
    stop.start()
    if identity.launched and not follow_parent(parent):
        raise StopRequestedError("the process that has started this one has ended")
    part = Participant(config, identity, tracker, prefix, stop, parent, open_channel(identity, stop), stays=recoverable)
    watchdog = part.make_watchdog()
    signing_key(config.checkpoint.key_env)
    make_loggers(config.telemetry.loggers)
    backend, store, no_task = choose_backend(config, identity), open_store(config.run.dir), cast(Task, None)
    if identity.local_rank == 0:
        check_run_folder(store, config, task=no_task)
    samples = Samples(SampleReader(()), None, "")
    context = TrainContext(
        config, identity, tracker, lambda: stop.request, part.check_attached, backend, no_task, samples, store
    )
    watchdog.start()
    session = hook.session = Session(context, part, watchdog, hook, recoverable)
    if recoverable:
        context.group = lone_group(identity, backend=backend, on_gpu=context.on_gpu)
    else:
        session.join()
    return session


def _log_own_messages(prefix: LogPrefix) -> None:
    """Show elastictrain's messages; all other logging is the user's."""
    logger = logging.getLogger("elastictrain")
    if not any(isinstance(handler, WorkerHandler) for handler in logger.handlers):
        logger.addHandler(WorkerHandler(sys.stderr, prefix=prefix))
        logger.propagate = False
    logger.setLevel(logging.INFO if prefix.rank == 0 else logging.WARNING)
