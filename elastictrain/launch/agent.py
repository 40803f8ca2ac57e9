"""torchrun, started ahead of time: it imports what it and its workers need, and waits for its orders on standard input.

Importing takes seconds, which a restart then does not wait for.
"""

import logging
import os
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from elastictrain.distributed.bounded import within
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.fault.exits import follow_parent
from elastictrain.fault.reasons import Reason, leave_reason
from elastictrain.fault.stop import STOP_SIGNALS
from elastictrain.identity import FOLDER, LAUNCHER
from elastictrain.launch.forks import Forks, hand_out, import_ahead
from elastictrain.launch.membership.messages import listed
from elastictrain.launch.orders import AgentAnswer, Orders, decode, write_answer
from elastictrain.launch.records import NO_RANK
from elastictrain.liveness.progress import Phase
from elastictrain.torch_private import find_agents

_EXIT_FAILED = 1

_RENDEZVOUS_ERRORS = frozenset(("DistError", "RendezvousError", "ConnectionError", "TimeoutError", "gaierror"))
"""Classes of errors that torchrun has where it cannot open its store, or reach that of another host."""

_LONGEST = 400
_ANSWER_S = 3.0
"""How long the store has to say who came, once the limit is over."""


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
    return _run(orders) if unfit is None else _complain(orders, unfit)


def _import_torchrun() -> Reason | None:
    """All that will be needed; why this host is unfit if that cannot be."""
    try:
        from torch.distributed import run  # noqa: F401
    except Exception as error:  # noqa: BLE001  # an incomplete installation may raise anything
        sentence = f"torch cannot be imported: {_summary(error)}; install it anew"
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
        _answer(orders, AgentAnswer(unforked=unforked))
    # What ended, and how, is said by the workers and by the launcher.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def give_up(missing: tuple[int, ...], sentence: str) -> None:
        _answer(orders, AgentAnswer(unforked=unforked, missing=missing))
        _exit(_complain(orders, _not_met(sentence)))

    # Where torchrun does not say that it starts a worker, there are no forks: every child is one.
    begun = (lambda: bool(psutil.Process().children())) if unhooked else (lambda: forks.begun)
    try:
        options = torchrun.parse_args(list(orders.arguments))  # type: ignore[no-untyped-call]  # torch does not annotate it
        _bound_rendezvous(orders, options, begun=begun, give_up=give_up)
        torchrun.run(options)  # type: ignore[no-untyped-call]  # torch does not annotate it
    except ChildFailedError as error:
        codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        _answer(orders, AgentAnswer(codes, forks.leaving(), unforked))
        return _EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # the edge of the process: what ends it is told to the launcher
        _answer(orders, AgentAnswer(leaving=forks.leaving(), unforked=unforked))
        reason = explain(error)
        if reason.exit_code != EXIT_TRANSPORT:
            traceback.print_exc()
        return _complain(orders, reason)
    return EXIT_OK


def _bound_rendezvous(
    orders: Orders, options: Namespace, *, begun: Callable[[], bool], give_up: Callable[[tuple[int, ...], str], None]
) -> None:
    """Unless workers have begun in time, have `give_up` called with the hosts to blame, by place, and a sentence.

    torchrun's client of its store has no limit where a host takes a connection and then says nothing. This looks from another
    thread: torchrun's own is in a call that does not return.
    """
    address, port, index, hosts = options.master_addr, options.master_port, options.node_rank, orders.hosts

    def look() -> None:
        if begun():
            return
        came = within(_ANSWER_S, lambda: find_agents(address, port, run_id=options.rdzv_id, count=len(hosts)))
        if not begun():
            missing = find_missing(came, index=index, count=len(hosts))
            give_up(missing, why_not_met(missing, hosts, f"{address}:{port}", after_s=orders.limit_s))

    timer = threading.Timer(min(orders.limit_s, threading.TIMEOUT_MAX), look)
    timer.daemon = True
    timer.start()


def find_missing(came: Collection[int] | None, *, index: int, count: int) -> tuple[int, ...]:
    """Places of the other hosts that have not come; the first where its store does not say who came. Empty if unknown."""
    first = () if index == 0 else (0,)
    if came is None:
        return first
    # The first host itself comes to its store only once all others have.
    return tuple(place for place in range(1, count) if place not in came and place != index) or first


def why_not_met(missing: Sequence[int], hosts: Sequence[str], place: str, *, after_s: float) -> str:
    """A sentence that names the hosts to blame; `place` is that of the store, which is on the first host."""
    store = f"the store on {hosts[0]} at {place}"
    likely = "frozen, cut off or gone, or a firewall drops what is sent"
    limit = f"{after_s:g} s (`fault.rendezvous_timeout_s`)"
    if not missing:
        return f"not all hosts have come to {store} within {limit}"
    if missing[0] == 0:
        return f"{store} has not answered for {limit}: {hosts[0]} is {likely} to it"
    names = listed(hosts[one] for one in missing)
    has, are = ("has", "it is") if len(missing) == 1 else ("have", "they are")
    return f"{names} {has} not come to {store} within {limit}: {are} {likely} to {hosts[0]}"


def explain(error: Exception) -> Reason:
    """Why torchrun itself failed."""
    # By name: torch has moved some of them.
    if not _RENDEZVOUS_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return _not_met(_summary(error))
    return Reason(NO_RANK, EXIT_BUG, str(Phase.START), 0, f"torchrun failed: {_summary(error)}")


def _not_met(why: str) -> Reason:
    return Reason(NO_RANK, EXIT_TRANSPORT, str(Phase.RENDEZVOUS), 0, f"torchrun could not bring the workers together: {why}")


def _summary(error: Exception) -> str:
    """What it is and its first line, which with errors of C++ is followed by a stack."""
    first = next(iter(str(error).splitlines()), "")
    kind = type(error).__name__
    return f"{kind}: {first}"[:_LONGEST] if first else kind


def _complain(orders: Orders, reason: Reason) -> int:
    if folder := orders.environment.get(FOLDER):
        leave_reason(folder, reason)
    sys.stderr.write(f"elastictrain: {reason.sentence}\n")
    return _EXIT_FAILED


def _answer(orders: Orders, answer: AgentAnswer) -> None:
    with suppress(OSError):
        write_answer(Path(orders.answer_file), answer)


def _exit(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # All hosts wait for this process before they start again, and to take torch apart takes a tenth of a second.
    os._exit(exit_code)


if __name__ == "__main__":
    _exit(main())
