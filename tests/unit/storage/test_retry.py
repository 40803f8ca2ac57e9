import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.errors import ObjectNotFoundError, TransientStorageError
from elastictrain.storage.failures import Fault, Retrying, RetryOptions, next_delay

OPTIONS = RetryOptions(attempts=5, base_s=1.0, max_delay_s=3.0, total_s=10.0)


def test_pauses_double_up_to_their_bound() -> None:
    delays = [next_delay(n, elapsed_s=0.0, options=OPTIONS, fault=Fault.TRANSIENT, jitter=1.0) for n in range(1, 6)]
    assert delays == [1.0, 2.0, 3.0, 3.0, None]


@given(
    attempt=st.integers(1, 10_000),
    elapsed_s=st.floats(0, 1e6),
    fault=st.sampled_from(Fault),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_next_delay_keeps_its_bounds(attempt: int, elapsed_s: float, fault: Fault, jitter: float) -> None:
    options = RetryOptions(attempts=100)
    delay = next_delay(attempt, elapsed_s=elapsed_s, options=options, fault=fault, jitter=jitter)
    if fault is not Fault.TRANSIENT or attempt >= options.attempts or elapsed_s > options.total_s:
        assert delay is None
    if delay is not None:
        assert options.base_s / 2 <= delay <= options.max_delay_s
        assert elapsed_s + delay <= options.total_s


class Clock:
    """Time passes in sleep only."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def retrying(clock: Clock, options: RetryOptions = OPTIONS) -> Retrying:
    return Retrying(options, clock=clock.time, sleep=clock.sleep, random=lambda: 0.0)


def test_succeeds_at_the_third_attempt() -> None:
    attempts: list[int] = []

    def request() -> str:
        attempts.append(len(attempts) + 1)
        if len(attempts) < 3:
            raise ConnectionResetError
        return "done"

    clock = Clock()
    assert retrying(clock).call(request, action="read", url="s3://b/k") == "done"
    assert attempts == [1, 2, 3]
    assert clock.now == 1.5


def test_gives_up_in_time() -> None:
    clock = Clock()

    def request() -> None:
        clock.now += 4.0
        raise TimeoutError("silence")

    with pytest.raises(TransientStorageError, match=r"s3://b/k.*silence") as raised:
        retrying(clock).call(request, action="read", url="s3://b/k")
    assert clock.now == 13.5
    assert isinstance(raised.value.__cause__, TimeoutError)


def test_permanent_failures_bugs_and_own_errors_are_not_repeated() -> None:
    def fail(error: Exception) -> None:
        attempts: list[None] = []

        def request() -> None:
            attempts.append(None)
            assert len(attempts) == 1
            raise error

        retrying(Clock()).call(request, action="read", url="u")

    with pytest.raises(ObjectNotFoundError):
        fail(FileNotFoundError())
    with pytest.raises(KeyError):
        fail(KeyError())
    own = TransientStorageError("said already")
    with pytest.raises(TransientStorageError) as raised:
        fail(own)
    assert raised.value is own


def test_once() -> None:
    clock = Clock()

    def request() -> None:
        raise ConnectionResetError

    with pytest.raises(TransientStorageError, match="attempt 1"):
        retrying(clock).once().call(request, action="write", url="u")
    assert clock.now == 0


def test_a_failure_takes_nothing_from_the_generator_of_a_task() -> None:
    """Stores fail in threads of a trainer, too, while its samples are drawn."""

    def missing() -> None:
        raise FileNotFoundError

    random.seed(1)
    before = random.getstate()
    with pytest.raises(ObjectNotFoundError):
        Retrying(OPTIONS).call(missing, action="read", url="x")
    assert random.getstate() == before
