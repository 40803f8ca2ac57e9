import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import pytest
import torch.distributed as dist

from elastictrain.distributed.generation import Introduction, agree
from elastictrain.distributed.group import connect
from elastictrain.distributed.store import PIECE_BYTES, BoundedStore, StoreExchange
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


def bounded_by(store: object, *, limit_s: float = LONG_S, poll: Callable[[], None] = lambda: None) -> BoundedStore:
    return BoundedStore(lambda: cast(dist.Store, store), limit_s=limit_s, poll=poll)


def test_a_host_that_is_frozen_is_named_in_time(frozen: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(TransportError, match=frozen) as caught:
        BoundedStore(lambda: connect(SECOND, timeout_s=LIMIT_S), limit_s=LIMIT_S)
    assert caught.value.missing == (0,)
    assert LIMIT_S <= time.monotonic() - began_s < 10 * LIMIT_S


@pytest.mark.parametrize("questions", [0, 1, 5])
def test_a_store_that_freezes_in_the_middle_of_an_agreement_is_named_in_time(questions: int, frozen: str) -> None:
    store, asked = SlowStore(), 0
    bounded = bounded_by(store, limit_s=LIMIT_S)

    def poll() -> None:
        nonlocal asked
        asked += 1
        if asked > questions:
            store.thawed.clear()

    if not questions:
        store.thawed.clear()
    began_s = time.monotonic()
    introduction = Introduction("here", 1, "gloo", "")
    try:
        with pytest.raises(TransportError, match=frozen):
            agree(bounded, SECOND, introduction, number=1, timeout_s=LONG_S, poll=poll)
    finally:
        store.thawed.set()
    assert time.monotonic() - began_s < 10 * LIMIT_S


def test_what_a_store_answers_is_handed_on() -> None:
    store = bounded_by(dist.HashStore())
    assert not store.check(["key"])
    store.set("key", "value")
    assert store.check(["key"])
    assert store.get("key") == b"value"


def test_an_error_of_the_store_is_one_line_that_names_its_host(frozen: str) -> None:
    def fail() -> None:
        raise RuntimeError("connection reset by peer\nException raised from C++:\nframe #0")

    with pytest.raises(TransportError, match=frozen) as caught:
        bounded_by(dist.HashStore()).ask(fail)
    assert "frame" not in str(caught.value)
    with pytest.raises(ZeroDivisionError):
        bounded_by(dist.HashStore()).ask(lambda: 1 // 0)


def test_whoever_waits_for_an_answer_may_leave_early() -> None:
    def leave() -> None:
        raise StopRequestedError("asked to stop")

    began_s = time.monotonic()
    thawed = threading.Event()
    with pytest.raises(StopRequestedError):
        bounded_by(dist.HashStore(), poll=leave).ask(lambda: thawed.wait(LONG_S))
    thawed.set()
    assert time.monotonic() - began_s < LONG_S / 2


class Recording:
    """A store that knows how large its values were."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.sizes: list[int] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        self.sizes.append(len(value))
        self.store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)


@pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)) * 40, b"a" * 100_000])
def test_what_is_left_is_found_whole_and_goes_in_small_pieces(value: bytes) -> None:
    store = Recording()
    exchange = StoreExchange(store)  # type: ignore[arg-type]
    exchange.put("word", value)
    assert exchange.get("word", limit_s=1.0) == value
    assert max(store.sizes) <= PIECE_BYTES


def test_random_bytes_over_a_real_store() -> None:
    value = bytes((number * number * 31 + 7) % 251 for number in range(20_000))
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, 1, is_master=False, wait_for_workers=False)
    StoreExchange(dist.PrefixStore("p", store)).put("word", value)
    assert StoreExchange(dist.PrefixStore("p", other)).get("word", limit_s=5.0) == value


def test_a_question_has_a_limit_and_an_answer_may_come_late() -> None:
    exchange = StoreExchange(dist.HashStore())
    began = time.monotonic()
    assert exchange.get("word", limit_s=0.1) is None
    assert 0.1 <= time.monotonic() - began < 2
    timer = threading.Timer(0.1, lambda: exchange.put("word", b"late"))
    timer.start()
    assert exchange.get("word", limit_s=10.0) == b"late"
    timer.join()


def test_a_store_that_is_gone_is_named() -> None:
    class Gone(Recording):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    exchange = StoreExchange(Gone())  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="Connection reset"):
        exchange.get("word", limit_s=1.0)
    with pytest.raises(TransportError):
        exchange.put("word", b"x")


def test_a_store_that_never_answers_does_not_keep_anybody() -> None:
    class Silent(Recording):
        def check(self, keys: list[str]) -> bool:
            threading.Event().wait(20)
            return True

    exchange = StoreExchange(Silent(), patience_s=0.2)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(TransportError, match="not answered"):
        exchange.get("word", limit_s=0.1)
    with pytest.raises(TransportError):
        exchange.put("word", b"x")
    assert time.monotonic() - began < 5


def test_the_main_thread_can_leave_early() -> None:
    def leave() -> None:
        raise StopRequestedError("asked to stop")

    exchange = StoreExchange(dist.HashStore(), poll=leave)
    began = time.monotonic()
    with pytest.raises(StopRequestedError):
        exchange.get("word", limit_s=30.0)
    assert time.monotonic() - began < 5
