import threading

import pytest

from elastictrain.errors import TransientStorageError
from elastictrain.storage.bounded_read import read_all, run_concurrently
from tests.unit.checkpoint.fakes import FakeStore


def test_calls_run_at_once_and_answer_in_their_order() -> None:
    together = threading.Barrier(5)

    def call(number: int) -> int:
        together.wait(10)
        return number

    assert run_concurrently([lambda number=number: call(number) for number in range(5)]) == list(range(5))
    assert run_concurrently([]) == []


def test_the_first_error_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def call(number: int) -> None:
        ended.append(number)
        if number in (3, 7):
            raise TransientStorageError(str(number))

    with pytest.raises(TransientStorageError, match="3"):
        run_concurrently([lambda number=number: call(number) for number in range(100)])
    assert sorted(ended) == list(range(100))


def test_objects_that_are_gone_are_left_out() -> None:
    store = FakeStore({"a": b"1", "b": b"2"})
    assert read_all(store, ["b", "x", "a"]) == {"b": b"2", "a": b"1"}
