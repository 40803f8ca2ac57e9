import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastictrain.fault.stop import STOP_SIGNALS, StopListener, StopNote, StopRequest, after_signal, is_news, write_stop_note


@contextmanager
def listening(
    clock: Callable[[], float] = time.monotonic, *, notice_s: float | None = None, stop_file: Path | None = None
) -> Iterator[StopListener]:
    """Its unix clock shows 1000 s more than `clock`."""
    file = None if stop_file is None else str(stop_file)
    listener = StopListener(clock, notice_s=notice_s, stop_file=file, wall=lambda: 1000.0 + clock())
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


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_the_file_says_why_and_until_when(number: signal.Signals, tmp_path: Path) -> None:
    write_stop_note(str(tmp_path / "stop"), StopNote("reclaimed", 1162.0))
    with listening(lambda: 42.0, notice_s=30.0, stop_file=tmp_path / "stop") as listener:
        os.kill(os.getpid(), number)
        assert request_of(listener) == StopRequest("reclaimed", 42.0, 162.0)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b'"SIGTERM"',
        b'{"deadline": 1000000.0}',
        b'{"reason": "", "deadline": 1000000.0}',
        b'{"reason": "it", "deadline": "noon"}',
        b'{"reason": "it", "deadline": true}',
        b'{"reason": "it", "deadline": NaN}',
        b'{"reason": "it", "deadline": 1e999}',
        b'{"reason": "it", "deadline": %s}' % (b"9" * 400),
        b"[" * 100_000,
    ],
)
def test_a_file_that_says_nothing_is_passed_over(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "stop").write_bytes(content)
    with listening(lambda: 42.0, notice_s=30.0, stop_file=tmp_path / "stop") as listener:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request_of(listener) == StopRequest("SIGTERM", 42.0, 72.0)
    warned = [
        message for message in caplog.messages if message.startswith(f"the reason to stop cannot be read from {tmp_path}")
    ]
    assert len(warned) == (content is not None)


NOTE = StopNote("reclaimed", 1050.0)
BEFORE = StopRequest("SIGUSR1", 5.0, 60.0)


@pytest.mark.parametrize(
    ("before", "note", "after"),
    [
        (None, None, StopRequest("SIGTERM", 10.0, 40.0)),
        (None, NOTE, StopRequest("reclaimed", 10.0, 50.0)),
        (None, StopNote("it", None), StopRequest("it", 10.0, 40.0)),
        # Left over from an earlier stop, most likely: there is no time in it to save anything.
        (None, StopNote("it", 1010.0), StopRequest("it", 10.0, 40.0)),
        (BEFORE, None, BEFORE),
        (BEFORE, NOTE, StopRequest("SIGUSR1", 5.0, 50.0)),
        (BEFORE, StopNote("it", 1061.0), BEFORE),
        (BEFORE, StopNote("it", 1009.0), BEFORE),
        (StopRequest("a person", 5.0), None, StopRequest("a person", 5.0)),
        (StopRequest("a person", 5.0), NOTE, StopRequest("a person", 5.0, 50.0)),
    ],
)
def test_the_first_reason_stays_and_the_earliest_deadline(
    before: StopRequest | None, note: StopNote | None, after: StopRequest
) -> None:
    assert after_signal(before, note, name="SIGTERM", now_s=10.0, now=1010.0, notice_s=30.0) == after


def test_the_last_note_decides_whether_the_host_stays() -> None:
    def told(request: StopRequest | None, note: StopNote | None, *, now_s: float) -> StopRequest:
        return after_signal(request, note, name="SIGTERM", now_s=now_s, now=1000.0 + now_s, notice_s=None)

    follow = StopNote("b leaves", 1100.0, host_stays=True)
    request = told(None, follow, now_s=10.0)
    assert request == StopRequest("b leaves", 10.0, 100.0, host_stays=True)
    assert told(request, follow, now_s=11.0) is request
    assert told(request, StopNote("spot", 1040.0), now_s=12.0) == StopRequest("b leaves", 10.0, 40.0)
    assert not told(request, None, now_s=12.0).host_stays


def test_a_signal_to_the_generation_before_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        listener.stop_file = str(tmp_path / "1.json")

        def renewed_meanwhile(path: str | None) -> StopNote | None:
            listener.renew(str(tmp_path / "2.json"), quiet=False)
            return StopNote("b leaves")

        monkeypatch.setattr("elastictrain.fault.stop.read_stop_note", renewed_meanwhile)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert listener.request is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert request_of(listener).reason == "b leaves"


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


def test_requests_of_a_generation_that_has_ended_are_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    write_stop_note(str(first), StopNote("grow", 1100.0))
    write_stop_note(str(second), StopNote("spot", 1150.0))
    with listening(lambda: 42.0, stop_file=first) as listener:
        listener.quiet = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert request_of(listener) == StopRequest("grow", 42.0, 100.0)
        listener.renew(str(second), quiet=False)
        assert listener.request is None
        os.kill(os.getpid(), signal.SIGTERM)
        # Neither the first reason nor its earlier deadline.
        assert request_of(listener) == StopRequest("spot", 42.0, 150.0)
        assert len(caplog.messages) == 1, "another rank of the host speaks now"
        listener.renew(None, quiet=True)
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
