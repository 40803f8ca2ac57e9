import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from elastictrain.distributed.exchange import PIECE_BYTES, StoreExchange
from elastictrain.errors import StopRequestedError, TransportError


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
    with pytest.raises(TransportError, match=r"the rendezvous store .* does not answer: Connection reset by peer"):
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
    with pytest.raises(TransportError, match=r"does not answer: no answer for 0\.2 s"):
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
