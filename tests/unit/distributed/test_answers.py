import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from elastictrain.distributed.answers import BoundedStore, StoreAnswers
from elastictrain.distributed.group import connect
from elastictrain.distributed.incarnation import Introduction, agree
from elastictrain.errors import StopRequestedError, TransportError
from elastictrain.identity import STORE_HOST, Identity

LIMIT_S = 0.3
LONG_S = 10.0
SECOND = Identity(1, 2, 0, 1, "here", launched=True)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a host that accepts connections, and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(STORE_HOST, "host-seven")
        yield f"host-seven at 127.0.0.1:{port}"


class SlowStore:
    """One that answers until it is frozen."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.thawed = threading.Event()
        self.thawed.set()

    def set(self, key: str, value: str, /) -> None:
        self.thawed.wait(LONG_S)
        self.store.set(key, value)

    def get(self, key: str, /) -> bytes:
        self.thawed.wait(LONG_S)
        return self.store.get(key)

    def check(self, keys: list[str], /) -> bool:
        self.thawed.wait(LONG_S)
        return self.store.check(keys)


def test_a_host_that_is_frozen_is_named_in_time(frozen: str) -> None:
    began_s = time.monotonic()
    answers = StoreAnswers(limit_s=LIMIT_S)
    with pytest.raises(TransportError, match=frozen):
        answers.ask(lambda: connect(SECOND, timeout_s=LIMIT_S))
    assert LIMIT_S <= time.monotonic() - began_s < 10 * LIMIT_S
    assert answers.left_s == 0.0


@pytest.mark.parametrize("questions", [0, 1, 5])
def test_a_store_that_freezes_in_the_middle_of_an_agreement_is_named_in_time(questions: int, frozen: str) -> None:
    store, asked = SlowStore(), 0
    answers = StoreAnswers(limit_s=LIMIT_S)

    def poll() -> None:
        nonlocal asked
        asked += 1
        if asked > questions:
            store.thawed.clear()

    if not questions:
        store.thawed.clear()
    began_s = time.monotonic()
    bounded, introduction = BoundedStore(store, answers), Introduction("here", 1, "gloo", "")
    try:
        with pytest.raises(TransportError, match=frozen):
            agree(bounded, SECOND, introduction, number=1, timeout_s=LONG_S, poll=poll)
    finally:
        store.thawed.set()
    assert time.monotonic() - began_s < 10 * LIMIT_S


def test_what_a_store_answers_is_handed_on() -> None:
    store = BoundedStore(dist.HashStore(), StoreAnswers(limit_s=LONG_S))
    assert not store.check(["key"])
    store.set("key", "value")
    assert store.check(["key"])
    assert store.get("key") == b"value"


def test_an_error_of_the_store_is_one_line_that_names_its_host(frozen: str) -> None:
    def fail() -> None:
        raise RuntimeError("connection reset by peer\nException raised from C++:\nframe #0")

    with pytest.raises(TransportError, match=frozen) as caught:
        StoreAnswers(limit_s=LONG_S).ask(fail)
    assert "frame" not in str(caught.value)
    with pytest.raises(ZeroDivisionError):
        StoreAnswers(limit_s=LONG_S).ask(lambda: 1 // 0)


def test_whoever_waits_for_an_answer_may_leave_early() -> None:
    def leave() -> None:
        raise StopRequestedError("asked to stop")

    began_s = time.monotonic()
    thawed = threading.Event()
    with pytest.raises(StopRequestedError):
        StoreAnswers(limit_s=LONG_S, poll=leave).ask(lambda: thawed.wait(LONG_S))
    thawed.set()
    assert time.monotonic() - began_s < LONG_S / 2
