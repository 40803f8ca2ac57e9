import threading
import time

import pytest

from elastictrain.distributed.bounded import call_until, each_within, within


@pytest.mark.parametrize("result", [3, 0, {}, "text"], ids=repr)
def test_what_returns_in_time_is_returned(result: object) -> None:
    assert within(5.0, lambda: result) is result


def test_what_never_returns_is_left_behind() -> None:
    release, left = threading.Event(), threading.Event()

    def hang() -> int:
        release.wait(10.0)
        left.set()
        return 3

    began_s = time.monotonic()
    assert within(0.05, hang) is None
    assert 0.05 <= time.monotonic() - began_s < 5.0
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "bounded")
    release.set()
    assert left.wait(5.0)


def test_what_raises_has_no_result() -> None:
    def fail() -> int:
        raise RuntimeError("BrokenLinks pipe")

    began_s = time.monotonic()
    assert within(10.0, fail) is None
    assert time.monotonic() - began_s < 5.0


def test_whoever_asks_gets_what_was_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        call_until(lambda: 1 // 0, left_s=lambda: 10.0)


def test_the_time_that_is_left_may_grow_and_whoever_waits_may_leave() -> None:
    release, left = threading.Event(), iter([0.1, 0.2, 0.0])
    with pytest.raises(TimeoutError):
        call_until(lambda: release.wait(10.0), left_s=lambda: next(left, 0.0))

    def leave() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        call_until(lambda: release.wait(10.0), left_s=lambda: 10.0, poll=leave)
    release.set()


def test_calls_side_by_side_each_have_their_own_limit() -> None:
    release = threading.Event()

    def hang() -> bool:
        return release.wait(10.0)

    def broken() -> bool:
        raise ValueError("no")

    began_s = time.monotonic()
    assert each_within([(0.1, hang), (5.0, lambda: True), (5.0, broken), (0.05, hang)]) == [None, True, None, None]
    assert time.monotonic() - began_s < 3.0
    release.set()
    assert each_within([]) == []


def test_an_answer_that_comes_too_late_is_none() -> None:
    """It is there when the others have answered."""
    never = threading.Event()
    assert each_within([(5.0, lambda: never.wait(0.3)), (0.01, lambda: not never.wait(0.1))]) == [False, None]


def test_without_room_for_a_thread_there_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert each_within([(1.0, lambda: 3), (1.0, lambda: 4)]) == [None, None]
