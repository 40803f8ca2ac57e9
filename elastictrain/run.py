"""Entry point of a worker: `python -m elastictrain.run recipe=...`, under torchrun or alone; or a program of the user's, after
`--`, in the place of a recipe."""

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from elastictrain.bytecode import bytecode_kept
from elastictrain.entry_point import leave_process, split_program
from elastictrain.errors import EXIT_OK, ElasticTrainError
from elastictrain.fault.launcher_channel import STANDBY_VARIABLE, has_been_called, tell_launcher
from elastictrain.fault.reasons import Reason, elect_reporter
from elastictrain.fault.stop import STOP_SIGNALS
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import Phase
from elastictrain.start_times import of_this_process

if TYPE_CHECKING:
    from elastictrain.config.compose import Composed


def main(arguments: Sequence[str] | None = None, *, composed: "Composed | None" = None) -> int:
    """Run to the end; returns the exit code. A process that trained must end with `leave_process`. `composed`: see
    `config.load`."""
    # Imports take seconds, in which the agent that started this worker may die: its pid must be read before.
    parent, times = os.getppid(), of_this_process(os.environ)
    arguments, program = split_program(sys.argv[1:] if arguments is None else arguments)
    if program:
        from elastictrain.own_loop.program import run_program

        return run_program(program, overrides=arguments, composed=composed)
    identity: Identity | None = None
    with bytecode_kept():
        try:
            identity = read_identity(os.environ)
            from elastictrain.config.command_line import read_command_line
            from elastictrain.config.help import RUN, requested_help
            from elastictrain.config.load import load

            text = requested_help(arguments, program=RUN, purpose="Train, or continue training.")
            if text is not None:
                if identity.is_log_rank:
                    sys.stdout.write(f"{text}\n")
                return EXIT_OK
            config = load(arguments, composed=composed)
            if (line := read_command_line(arguments)).action == "dry_run":
                from elastictrain.train.dry_run import dry_run

                if identity.is_log_rank:
                    sys.stdout.write(f"{dry_run(config, identity, gpus=line.topic)}\n")
                return EXIT_OK
        except ElasticTrainError as error:
            return complain(error, identity)
        times.end_part("configuration")
        from elastictrain.distributed.device import start_device
        from elastictrain.fault.exits import wait_for_previous_workers

        start_device(config.parallel, local_rank=identity.local_rank, wait=partial(wait_for_previous_workers, identity))
        from elastictrain.train.worker import run_worker
    times.end_part("imports")
    return run_worker(config, identity, parent=parent, standby=os.environ.get(STANDBY_VARIABLE, ""), times=times)


def complain(error: ElasticTrainError, identity: Identity | None = None) -> int:
    """Print once per host what is wrong; returns the exit code."""
    if identity is not None:
        tell_launcher(identity, Reason(identity.rank, error.exit_code, str(Phase.START), 0, str(error)))
    # A pending SIGTERM ends this process here: no handler is installed yet. The launcher may have blocked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if identity is None or elect_reporter(identity.local_rank, ending=partial(has_been_called, identity)):
        sys.stderr.write(f"elastictrain: {error}\n")
    return error.exit_code


if __name__ == "__main__":
    # Until the worker listens, Ctrl-C has nothing to save and nothing to report.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The fork server has composed the configuration for all workers that it forks.
    leave_process(main(composed=globals().get("COMPOSED")))
