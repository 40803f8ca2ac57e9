"""torchrun, started ahead of time: it imports what it and its workers need, and waits for its orders on standard input.

Importing takes seconds, which a restart then does not wait for.
"""

import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.fault.exits import follow_parent
from elastictrain.fault.reasons import Reason, leave_reason
from elastictrain.fault.stop import STOP_SIGNALS
from elastictrain.identity import FOLDER, LAUNCHER
from elastictrain.launch.forks import Forks, hand_out, import_ahead
from elastictrain.launch.orders import AgentAnswer, Orders, decode, write_answer
from elastictrain.launch.records import NO_RANK
from elastictrain.launch.rendezvous import StorePlace, bound_rendezvous
from elastictrain.liveness.progress import Phase

_EXIT_FAILED = 1

_MEETING_ERRORS = frozenset(("DistError", "RendezvousError", "ConnectionError", "TimeoutError", "gaierror"))
"""Classes of errors that torchrun has where it cannot open its store, or reach that of another host."""

_LONGEST = 400


def main() -> int:
    """Wait, run, and tell how the workers ended; returns 0 if all of them ended well."""
    # Where it is ignored, which a program inherits, nobody is told how a worker ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Schedulers send their signals to every process. The launcher asks the workers to stop; torchrun would end them half a
    # minute after a signal of its own, whatever they have to save. Workers inherit the mask, and lift it once they listen: what
    # came before that is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGHUP))
    # The workers follow with a SIGTERM of their own, and save.
    if not follow_parent(os.getppid(), with_signal=signal.SIGKILL):
        return _EXIT_FAILED
    unfit = _import_torchrun()
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_OK
    orders = decode(line)
    # The launcher may have died before this process came to follow it, and then another one was followed.
    if orders.environment.get(LAUNCHER) != str(os.getppid()):
        return _EXIT_FAILED
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.environ.update(orders.environment)
    if unfit is not None:
        return _complain(orders, unfit)
    return _run(orders)


def _import_torchrun() -> Reason | None:
    """All that will be needed; why this host is unfit if that cannot be."""
    try:
        from torch.distributed import run  # noqa: F401
    except Exception as error:  # noqa: BLE001  # an incomplete installation may raise anything
        sentence = f"torch cannot be imported: {_words(error)}; install it anew"
        return Reason(NO_RANK, EXIT_UNFIT, str(Phase.START), 0, sentence)
    import_ahead()
    return None


def _run(orders: Orders) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    forks = Forks()
    unhooked = hand_out(forks)
    unforked = unhooked or forks.prepare(orders.processes)
    if unforked:
        # Before the workers start: the launcher looks when their first step is through.
        _tell(orders, AgentAnswer(unforked=unforked))
    # What ended, and how, is said by the workers and by the launcher.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def not_met(missing: tuple[int, ...], sentence: str) -> None:
        _tell(orders, AgentAnswer(unforked=unforked, missing=missing))
        _leave_now(_complain(orders, _not_met(sentence)))

    # Where torchrun does not say that it starts a worker, there are no forks: every child is one.
    begun = (lambda: bool(psutil.Process().children())) if unhooked else (lambda: forks.begun)
    try:
        options = torchrun.parse_args(list(orders.arguments))  # type: ignore[no-untyped-call]  # torch does not annotate it
        place = StorePlace(options.master_addr, options.master_port, options.rdzv_id, options.node_rank)
        bound_rendezvous(place, orders.hosts, limit_s=orders.limit_s, begun=begun, not_met=not_met)
        torchrun.run(options)  # type: ignore[no-untyped-call]  # torch does not annotate it
    except ChildFailedError as error:
        codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        _tell(orders, AgentAnswer(codes, forks.leaving(), unforked))
        return _EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # the edge of the process: what ends it is told to the launcher
        _tell(orders, AgentAnswer(leaving=forks.leaving(), unforked=unforked))
        reason = explain(error)
        if reason.exit_code != EXIT_TRANSPORT:
            traceback.print_exc()
        return _complain(orders, reason)
    return EXIT_OK


def explain(error: Exception) -> Reason:
    """Why torchrun itself failed."""
    # By name: torch has moved some of them.
    if not _MEETING_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return _not_met(_words(error))
    return Reason(NO_RANK, EXIT_BUG, str(Phase.START), 0, f"torchrun failed: {_words(error)}")


def _not_met(why: str) -> Reason:
    return Reason(NO_RANK, EXIT_TRANSPORT, str(Phase.RENDEZVOUS), 0, f"torchrun could not bring the workers together: {why}")


def _words(error: Exception) -> str:
    """What it is and its first line, which with errors of C++ is followed by a stack."""
    first = next(iter(str(error).splitlines()), "")
    kind = type(error).__name__
    return f"{kind}: {first}"[:_LONGEST] if first else kind


def _complain(orders: Orders, reason: Reason) -> int:
    if folder := orders.environment.get(FOLDER):
        leave_reason(folder, reason)
    sys.stderr.write(f"elastictrain: {reason.sentence}\n")
    return _EXIT_FAILED


def _tell(orders: Orders, answer: AgentAnswer) -> None:
    with suppress(OSError):
        write_answer(Path(orders.answer_file), answer)


def _leave_now(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # All hosts wait for this process before they start again, and to take torch apart takes a tenth of a second.
    os._exit(exit_code)


if __name__ == "__main__":
    _leave_now(main())
