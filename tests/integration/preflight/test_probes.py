from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.preflight.links.probes import candidates, exchange_offset, find_largest_packet
from elastictrain.preflight.links.responder import Responder, ResponderKey

TOKEN = b"a token"
UDP_HEADERS = 28


@given(passing=st.integers(576, 9000), gap=st.integers(1, 9000))
def test_candidates_lie_between(passing: int, gap: int) -> None:
    sizes = candidates(passing, passing + gap)
    assert all(passing < size < passing + gap for size in sizes)
    assert bool(sizes) == (gap > 1)


def test_common_sizes_are_found_in_one_round() -> None:
    assert {1500, 1501, 1450, 1451, 8950, 8951} <= set(candidates(576, 9000))


@contextmanager
def path(monkeypatch: pytest.MonkeyPatch, passes: Callable[[int], bool]) -> Iterator[Callable[[int], int]]:
    """Loopback, on which packets are lost by their size."""
    real = ResponderKey.answer

    def answer(self: ResponderKey, data: bytes) -> bytes | None:
        return real(self, data) if passes(len(data) + UDP_HEADERS) else None

    monkeypatch.setattr(ResponderKey, "answer", answer)
    responder = Responder("127.0.0.1")
    responder.start()
    responder.set_token(TOKEN)
    key = ResponderKey(TOKEN, responder.nonce)
    try:
        place = ("127.0.0.1", responder.udp_port)
        yield lambda intended: find_largest_packet(place, source="127.0.0.1", key=key, intended=intended, wait_s=0.15)
    finally:
        responder.close()


@pytest.mark.parametrize("limit", [9000, 1500, 8917, 577])
def test_the_largest_that_passes_is_found(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    with path(monkeypatch, lambda size: size <= limit) as largest:
        assert largest(9000) == limit


def test_a_packet_that_is_lost_by_chance_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def passes(size: int) -> bool:
        tries.append(size)
        return tries.count(size) > 1

    with path(monkeypatch, passes) as largest:
        assert largest(9000) == 9000


def test_silence_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with path(monkeypatch, lambda size: False) as largest:
        assert largest(9000) == 0


def test_frames_of_strangers_are_not_answered() -> None:
    key, other = ResponderKey(TOKEN, b"n"), ResponderKey(b"another", b"n")
    frame = key.probe(1500, size=1472)
    assert len(frame) == 1472
    answer = key.answer(frame)
    assert answer is not None
    assert len(answer) <= len(frame)
    assert (key.acknowledged(answer), other.acknowledged(answer), key.acknowledged(frame)) == (1500, None, None)
    assert other.answer(frame) is key.answer(frame[:-1]) is key.answer(answer) is None


@given(st.binary(max_size=80))
def test_garbage_is_not_answered(data: bytes) -> None:
    assert ResponderKey(TOKEN, b"n").answer(data) is None


def test_an_exchange_does_not_count_the_way() -> None:
    assert exchange_offset(asked=100.0, received=120.5, answered=120.6, heard=101.1) == 20.0
