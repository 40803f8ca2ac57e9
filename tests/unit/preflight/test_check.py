import threading
import time

import pytest

from elastictrain.preflight.check import Check, Once, run_checks
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.made import verdict


def test_many_threads_ask_once() -> None:
    asked = []

    def ask() -> int:
        asked.append(1)
        time.sleep(0.02)
        return 7

    once = Once(ask)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(once())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (answers, asked) == ([7] * 8, [1])


def test_nothing_is_an_answer_too_and_trouble_is_told_to_all() -> None:
    asked = []
    nothing: Once[None] = Once(lambda: asked.append(1))
    assert (nothing(), nothing(), asked) == (None, None, [1])

    def broken() -> int:
        raise RuntimeError("no")

    once = Once(broken)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            once()


def test_verdicts_come_in_the_order_of_checks_with_what_they_took() -> None:
    def slow() -> list:
        time.sleep(0.05)
        return [verdict(check="slow"), verdict("warn", check="slow")]

    found = run_checks([Check("slow", slow, 5.0), Check("fast", lambda: [verdict(check="fast")], 5.0)], subject="a")
    assert [(one.check, one.status) for one in found] == [("slow", "pass"), ("slow", "warn"), ("fast", "pass")]
    assert found[0].seconds >= 0.05 > found[2].seconds


def test_a_check_that_hangs_is_a_failure_and_holds_nobody_up() -> None:
    released = threading.Event()

    def hang() -> list:
        released.wait(30)
        return []

    began = time.monotonic()
    found = run_checks(
        [Check("hangs", hang, 0.1), Check("fast", lambda: [verdict(check="fast")], 5.0), Check("too", hang, 0.2)], subject="a"
    )
    assert time.monotonic() - began < 2
    released.set()
    assert [(one.check, one.status, one.measured) for one in found] == [
        ("hangs", Status.FAIL, "no answer in 0.1 s"),
        ("fast", Status.PASS, None),
        ("too", Status.FAIL, "no answer in 0.2 s"),
    ]
    assert "preflight.checks.hangs=off" in found[0].remedy


def test_an_answer_that_comes_too_late_is_none() -> None:
    def late() -> list:
        time.sleep(0.1)
        return [verdict()]

    def later() -> list:
        time.sleep(0.3)
        return [verdict(check="later")]

    found = run_checks([Check("late", late, 0.01), Check("later", later, 5.0)], subject="a")
    assert [(one.check, one.status) for one in found] == [("late", "fail"), ("later", "pass")]


def test_a_check_that_breaks_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    found = run_checks([Check("broken", lambda: 1 // 0, 5.0)], subject="a")  # type: ignore[arg-type, return-value]
    assert [(one.status, one.measured) for one in found] == [
        (Status.FAIL, "ZeroDivisionError: integer division or modulo by zero")
    ]
    assert "check broken broke" in caplog.text


def test_a_check_may_find_nothing_to_say() -> None:
    assert run_checks([Check("calm", list, 5.0)], subject="a") == []
    assert run_checks([], subject="a") == []
