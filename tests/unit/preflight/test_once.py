import threading
import time

import pytest

from elastictrain.preflight.once import Once


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
