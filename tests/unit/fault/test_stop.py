import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastictrain.fault.stop import STOP_SIGNALS, StopListener, StopRequest


@contextmanager
def listening(clock: Callable[[], float] = time.monotonic) -> Iterator[StopListener]:
    listener = StopListener(clock)
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


def open_descriptors() -> set[str]:
    """Those that are open once the listing itself is closed."""
    return {link.name for link in Path("/proc/self/fd").iterdir() if link.exists()}


def request_of(listener: StopListener) -> StopRequest:
    deadline = time.monotonic() + 5.0
    while listener.request is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert listener.request is not None
    return listener.request


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_becomes_a_request(number: signal.Signals) -> None:
    with listening(lambda: 42.0) as listener:
        assert listener.request is None
        os.kill(os.getpid(), number)
        assert request_of(listener) == StopRequest(number.name, 42.0)


def test_the_first_reason_stays() -> None:
    with listening() as listener:
        os.kill(os.getpid(), signal.SIGUSR1)
        first = request_of(listener)
        os.kill(os.getpid(), signal.SIGTERM)
        listener.ask("wall clock")
        time.sleep(0.02)
        assert listener.request is first


def test_a_signal_is_seen_while_the_main_thread_runs_no_python_code() -> None:
    """A handler in Python would have to wait for the main thread, which is blocked in a lock here as it is in a collective."""
    seen_s: list[float] = []
    block = threading.Lock()

    def watch(listener: StopListener) -> None:
        began_s = time.monotonic()
        while listener.request is None and time.monotonic() - began_s < 5.0:
            time.sleep(0.001)
        seen_s.append(time.monotonic() - began_s)
        block.release()

    with listening() as listener:
        block.acquire()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            watcher = threading.Thread(target=watch, args=(listener,))
            watcher.start()
            # Blocked in this thread, the signal is delivered to another one: the main thread runs no handler.
            sender = threading.Thread(target=_unblock_and_raise)
            sender.start()
            with block:
                sender.join()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        watcher.join()
    assert seen_s[0] < 2.0


def _unblock_and_raise() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)


def test_other_signals_are_no_stop() -> None:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        with listening() as listener:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.02)
            assert listener.request is None
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_close_puts_everything_back() -> None:
    seen: list[int] = []
    mine = lambda number, frame: seen.append(number)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, mine)
    others = {number: signal.getsignal(number) for number in STOP_SIGNALS if number != signal.SIGUSR1}
    descriptors = open_descriptors()
    try:
        with listening():
            pass
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert {number: signal.getsignal(number) for number in others} == others
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        assert open_descriptors() == descriptors
        assert not [thread for thread in threading.enumerate() if thread.name == "stop-listener"]
        previous = signal.set_wakeup_fd(-1)
        assert previous == -1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_python_did_not_install_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """signal.signal returns None for a handler that C code has installed, and does not take None back."""
    real = signal.signal
    listener = StopListener()

    def signal_of_c(number: int, handler: object) -> object:
        real(number, handler)  # type: ignore[arg-type]
        return None if number == signal.SIGUSR1 else signal.SIG_DFL

    monkeypatch.setattr("elastictrain.fault.stop.signal.signal", signal_of_c)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    listener.start()
    monkeypatch.undo()
    try:
        listener.close()
    finally:
        for number, handler in before.items():
            real(number, handler)
