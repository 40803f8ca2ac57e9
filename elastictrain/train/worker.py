"""The life of one worker: start, agree, build, restore, train, end."""

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


def run_worker(config: RunConfig, identity: Identity, *, parent: int) -> int:
    """Train to the end in this process; returns the exit code. Only this function and run.py touch process-wide settings.
    `parent` is the process that started this one, read before anything else was done."""
    tracker = ProgressTracker()
    prefix = LogPrefix(identity.rank, step=lambda: tracker.mark.step)
    set_up_logging(prefix)
    torch.set_num_threads(config.run.num_threads)
    if config.run.deterministic:
        # cuBLAS picks among algorithms at run time unless its workspace has a fixed size; read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # Never closed: a SIGTERM while this process ends must not change its exit code.
    stop = StopListener(notice_s=config.fault.notice_s, stop_file=os.environ.get(STOP_FILE_VARIABLE))
    if identity.local_rank > 0:
        stop.quiet = True
    stop.start()
    if identity.launched and not follow_parent(parent):
        return EXIT_STOPPED
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
    watchdog.start()
    code = EXIT_BUG
    try:
        code = _train(report, prefix, parent=parent)
    except BaseException as error:  # noqa: BLE001  the edge of the process: everything that ends it is accounted for
        code = report.failed(error, bounded=watchdog.close)
    finally:
        if report.context is not None and report.context.lease is not None:
            # A restart after a failure has the same owner, so the lease is kept.
            report.context.lease.close(give_back=code in (EXIT_OK, EXIT_STOPPED))
        watchdog.close()
    return code


def _train(report: ExitReport, prefix: LogPrefix, *, parent: int) -> int:
    identity, tracker = report.identity, report.tracker
    context = meet_ranks(
        report.config,
        identity,
        tracker=tracker,
        stop_request=report.stop_request,
        parent=parent,
        on_lost=report.lease_lost,
    )
    report.context = context
    prefix.incarnation = context.generation.name
    report.hangs.begin(context)
    form_group(context)
    # The process that would restart this worker; the launcher's process from which it forks may be replaced.
    agent = parent if identity.launched else os.getpid()
    report.hangs.group_formed(context.backend, None)
    link = start_saver(context, agent=identity.launcher.pid if identity.launcher is not None else agent)
    report.hangs.group_formed(context.backend, link)
    loop = report.loop = build(context, link)
    code, reason = EXIT_OK, "done"
    try:
        loop.run()
        tracker.set_phase(Phase.EVAL, step=loop.state.step)
        show_sample(context, loop.stepper.wrapped, print_line=loop.observer.print_line)
    except StopRequestedError as error:
        code, reason = EXIT_STOPPED, str(error)
    tracker.set_phase(Phase.END, step=loop.state.step)
    report.in_order(context, loop, code=code, reason=reason)
    leave(context.group)
    report.hangs.close()
    context.journal.close()
    return code
