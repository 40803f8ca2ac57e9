import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastictrain.fault.stop import STOP_SIGNALS, StopListener, StopRequest, is_news


@contextmanager
def listening(clock: Callable[[], float] = time.monotonic, *, notice_s: float | None = None) -> Iterator[StopListener]:
    """Its unix clock shows 1000 s more than `clock`."""
    listener = StopListener(clock, notice_s=notice_s, wall=lambda: 1000.0 + clock())
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_becomes_a_request(name: str) -> None:
    with listening(lambda: 42.0) as listener:
        assert listener.request is None
        # One that nobody listens to would end the tests.
        if signal.Signals[name] in STOP_SIGNALS:
            os.kill(os.getpid(), signal.Signals[name])
        assert request_of(listener) == StopRequest(name, 42.0)


def test_a_signal_that_comes_while_handlers_are_installed_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    really = signal.signal

    def install(number: int, handler: signal.Handlers) -> object:
        previous = really(number, handler)
        monkeypatch.setattr(signal, "signal", really)
        os.kill(os.getpid(), number)
        return previous

    monkeypatch.setattr(signal, "signal", install)
    with listening() as listener:
        assert request_of(listener).reason == STOP_SIGNALS[0].name


def test_the_first_reason_stays() -> None:
    with listening() as listener:
        os.kill(os.getpid(), signal.SIGUSR1)
        first = request_of(listener)
        os.kill(os.getpid(), signal.SIGTERM)
        listener.ask("wall clock")
        time.sleep(0.02)
        assert listener.request == first


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
            rank_monitor = threading.Thread(target=watch, args=(listener,))
            rank_monitor.start()
            # Blocked in this thread, the signal is delivered to another one: the main thread runs no handler.
            sender = threading.Thread(target=_unblock_and_raise)
            sender.start()
            with block:
                sender.join()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        rank_monitor.join()
    assert seen_s[0] < 2.0


def _unblock_and_raise() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)


def test_other_signals_are_no_stop() -> None:
    before = signal.signal(signal.SIGWINCH, lambda number, frame: None)
    try:
        with listening() as listener:
            os.kill(os.getpid(), signal.SIGWINCH)
            time.sleep(0.02)
            assert listener.request is None
    finally:
        signal.signal(signal.SIGWINCH, before)


def test_a_signal_alone_leaves_the_time_that_is_configured() -> None:
    with listening(lambda: 42.0, notice_s=30.0) as listener:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request_of(listener) == StopRequest("SIGTERM", 42.0, 72.0)


def test_a_signal_after_a_request_changes_neither_reason_nor_deadline() -> None:
    with listening(lambda: 42.0, notice_s=30.0) as listener:
        listener.ask("reclaimed", deadline=1162.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert listener.request == StopRequest("reclaimed", 42.0, 162.0)


def test_the_last_request_decides_whether_the_host_stays() -> None:
    with listening(lambda: 42.0, notice_s=30.0) as listener:
        listener.ask("b leaves", deadline=1142.0, host_stays=True)
        assert listener.request == StopRequest("b leaves", 42.0, 142.0, host_stays=True)
        listener.ask("spot", deadline=1082.0)
        assert listener.request == StopRequest("b leaves", 42.0, 82.0)
        listener.ask("b leaves", deadline=1142.0, host_stays=True)
        assert listener.request == StopRequest("b leaves", 42.0, 82.0, host_stays=True)
        # It is sent to this process alone, so perhaps the host is taken away.
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while request_of(listener).host_stays:
            assert time.monotonic() < deadline


def test_what_is_not_a_signal_can_ask_too(caplog: pytest.LogCaptureFixture) -> None:
    with listening(lambda: 42.0) as listener:
        listener.ask("limit", deadline=1142.0)
        assert listener.request == StopRequest("limit", 42.0, 142.0)
        listener.ask("reclaimed", deadline=1072.0)
        listener.ask("something else", deadline=1090.0)
        listener.ask("something else")
        assert listener.request == StopRequest("limit", 42.0, 72.0)
    assert ["100 s" in caplog.messages[0], "30 s" in caplog.messages[1], len(caplog.messages)] == [True, True, 2]


@pytest.mark.parametrize(
    ("deadline_s", "before", "news"),
    [
        (None, None, True),
        (None, StopRequest("it", 1.0), False),
        (50.0, StopRequest("it", 1.0), True),
        (50.0, StopRequest("it", 1.0, 50.5), False),
        (50.0, StopRequest("it", 1.0, 52.0), True),
        (None, StopRequest("another", 1.0), True),
    ],
)
def test_a_person_is_told_of_what_is_new(deadline_s: float | None, before: StopRequest | None, news: bool) -> None:
    assert is_news(StopRequest("it", 1.0, deadline_s), before=before) is news


def test_a_deadline_that_is_told_again_is_said_once_and_nothing_by_who_is_mute(caplog: pytest.LogCaptureFixture) -> None:
    """The launcher asks again and again; on each host one process speaks."""
    with listening(lambda: 42.0) as listener:
        for deadline in (1142.0, 1141.99, 1141.5):
            listener.ask("reclaimed", deadline=deadline)
        assert ["100 s" in message for message in caplog.messages] == [True]
        listener.quiet = True
        listener.ask("reclaimed", deadline=1072.0)
        assert len(caplog.messages) == 1
        assert listener.request is not None
        assert listener.request.deadline_s == 72.0


def test_requests_of_a_generation_that_has_ended_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    with listening(lambda: 42.0) as listener:
        listener.quiet = True
        listener.ask("grow", deadline=1100.0)
        listener.renew(quiet=False)
        assert listener.request is None
        # Neither the first reason nor its earlier deadline.
        listener.ask("spot", deadline=1150.0)
        assert listener.request == StopRequest("spot", 42.0, 150.0)
        assert len(caplog.messages) == 1, "another rank of the host speaks now"
        listener.renew(quiet=True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request_of(listener) == StopRequest("SIGTERM", 42.0)
        assert len(caplog.messages) == 1


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
