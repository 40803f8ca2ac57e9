"""torchrun, started ahead of time: it imports what it and its workers need, and waits for its orders on standard input.

Importing takes seconds, which a restart then does not wait for.
"""

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from elastictrain.errors import EXIT_OK
from elastictrain.fault.parent import follow_parent
from elastictrain.fault.stop import STOP_SIGNALS
from elastictrain.launch.forks import Forks, hand_out, import_ahead
from elastictrain.launch.orders import Orders, decode

_EXIT_FAILED = 1


def main() -> int:
    """Wait, run, and tell how the workers ended; returns 0 if all of them ended well."""
    # Schedulers send their signals to every process. The launcher asks the workers to stop; torchrun would end them half a
    # minute after a signal of its own, whatever they have to save. Workers inherit the mask, and lift it once they listen: what
    # came before that is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGHUP))
    # The workers follow with a SIGTERM of their own, and save.
    if not follow_parent(os.getppid(), with_signal=signal.SIGKILL):
        return _EXIT_FAILED
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    import_ahead()
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_OK
    orders = decode(line)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.environ.update(orders.environment)
    forks = Forks()
    forks.prepare(orders.processes)
    hand_out(forks)
    # What ended, and how, is said by the workers and by the launcher.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(list(orders.arguments)))  # type: ignore[no-untyped-call]  # torch annotates neither
    except ChildFailedError as error:
        _tell(orders, {failure.local_rank: failure.exitcode for failure in error.failures.values()})
        return _EXIT_FAILED
    return EXIT_OK


def _tell(orders: Orders, codes: dict[int, int]) -> None:
    with suppress(OSError):
        Path(orders.codes_file).write_text(json.dumps(codes))


if __name__ == "__main__":
    sys.exit(main())
