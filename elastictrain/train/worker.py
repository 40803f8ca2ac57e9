"""One worker's life: start, agree, build, restore, train, end."""

import os

import torch

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.group import leave
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_STOPPED, StopRequestedError
from elastictrain.fault.exits import follow_parent
from elastictrain.fault.stop import STOP_FILE_VARIABLE, StopListener
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Watchdog
from elastictrain.telemetry.log import LogPrefix, set_up_logging
from elastictrain.train.bringup import form_group, meet_ranks
from elastictrain.train.build import build
from elastictrain.train.evaluate import show_sample
from elastictrain.train.exit_report import ExitReport
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.snapshot_memory import start_saver


class Worker:
    """Runs one configuration in this process. All that is global to a process is touched here and in run.py."""

    def __init__(self, config: RunConfig, identity: Identity, *, parent: int) -> None:
        """`parent` is the process that started this one, read before anything else was done."""
        self._config = config
        self._identity = identity
        self._parent = parent
        self._tracker = ProgressTracker()
        self._hangs = HangWatch(config, identity, self._tracker)
        self._stop = StopListener(notice_s=config.fault.notice_s, stop_file=os.environ.get(STOP_FILE_VARIABLE))
        self._exit = ExitReport(config, identity, self._tracker, self._hangs, lambda: self._stop.request)
        self._watchdog = Watchdog(
            config.fault,
            mark=lambda: self._tracker.mark,
            stop=lambda: self._stop.request,
            end=self._exit.overdue,
            others=self._hangs.others,
            beat=self._hangs.beat,
        )
        self._prefix = LogPrefix(identity.rank, step=lambda: self._tracker.mark.step)

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
        except BaseException as error:  # noqa: BLE001  the edge of the process: everything that ends it is accounted for
            # The report has a limit of its own, which keeps the exit code.
            self._watchdog.close()
            code = self._exit.failed(error)
        finally:
            context = self._exit.context
            if context is not None and context.lease is not None:
                # A restart after a failure is still the same owner.
                context.lease.close(give_back=code in (EXIT_OK, EXIT_STOPPED))
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
            on_lost=self._exit.lease_lost,
        )
        # From now on failures can be recorded.
        self._exit.context = context
        self._prefix.incarnation = context.generation.name
        self._hangs.begin(context)
        form_group(context)
        # The process that would start this worker again; the one that our launcher forks it from may be replaced.
        agent = self._parent if self._identity.launched else os.getpid()
        link = start_saver(context, agent=self._identity.launcher.pid if self._identity.launcher is not None else agent)
        self._hangs.group_formed(context.backend, link)
        loop = self._exit.loop = build(context, link)
        code, reason = EXIT_OK, "done"
        try:
            loop.run()
            self._tracker.set_phase(Phase.EVAL, step=loop.state.step)
            show_sample(context, loop.stepper.wrapped, print_line=loop.observer.print_line)
        except StopRequestedError as error:
            code, reason = EXIT_STOPPED, str(error)
        self._tracker.set_phase(Phase.END, step=loop.state.step)
        self._exit.in_order(context, loop, code=code, reason=reason)
        leave(context.group)
        self._hangs.close()
        context.journal.close()
        return code
