import hashlib
import hmac
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.launch.heartbeat import HeartbeatDatagram, is_new, seal, shortened, unseal
from elastictrain.launch.membership.records import EndKind, HostRecord
from tests.unit.launch.membership.made import end, record

TOKEN = b"t" * 32
DATAGRAM = HeartbeatDatagram("host-0a1b2c3d", "host-4e5f6a7b", 12, 7, ended=True)


@given(st.text(max_size=30), st.text(max_size=30), st.integers(1, 10**12), st.integers(0, 10**9), st.booleans())
def test_what_is_said_is_heard(host: str, to: str, counter: int, generation: int, ended: bool) -> None:
    datagram = HeartbeatDatagram(host, to, counter, generation, ended)
    assert unseal(seal(datagram, token=TOKEN), token=TOKEN) == datagram


def a_record(*, reason: str = "it broke", name: str = "a") -> HostRecord:
    return replace(record(name), end=replace(end(name, EndKind.FAILED, 70), reason=reason))


def test_a_record_is_told_without_what_takes_room() -> None:
    short = shortened(a_record(reason="line\n" * 1000))
    assert short is not None
    datagram = replace(DATAGRAM, host="a", record=short)
    assert unseal(seal(datagram, token=TOKEN), token=TOKEN) == datagram
    assert short.hears == ()
    assert short.end is not None
    assert 0 < len(short.end.reason) <= 300


@given(st.text(max_size=400), st.integers(1, 80), st.integers(0, 40))
def test_a_record_fits_into_any_packet_or_is_not_sent(reason: str, host_chars: int, num_blamed: int) -> None:
    host = "h" * host_chars
    line = a_record(reason=reason, name=host)
    assert line.end is not None
    short = shortened(replace(line, end=replace(line.end, blames=(host,) * num_blamed)))
    assert short is not None or host_chars * num_blamed > 100
    if short is not None:
        data = seal(HeartbeatDatagram(host, "t" * 80, 10**12, 10**9, ended=True, record=short), token=TOKEN)
        assert len(data) <= 1232
        assert unseal(data, token=TOKEN) is not None


def test_a_record_of_another_host_or_of_none_is_no_word() -> None:
    def signed(*fields: object) -> bytes:
        body = json.dumps(fields).encode()
        return hmac.new(TOKEN, body, hashlib.sha256).digest()[:16] + body

    line = asdict(replace(a_record(), hears=()))
    assert unseal(signed("a", "b", 1, 1, True, line), token=TOKEN) is not None
    for other in ({**line, "host": "c"}, {**line, "beat": "1"}, {**line, "end": {}}, {}, [], None, 3):
        assert unseal(signed("a", "b", 1, 1, True, other), token=TOKEN) is None
    assert unseal(signed("a", "b", 1, 1, True, line, line), token=TOKEN) is None


def test_another_run_is_not_heard() -> None:
    assert unseal(seal(DATAGRAM, token=b"u" * 32), token=TOKEN) is None


def test_no_bit_can_be_changed() -> None:
    data = seal(DATAGRAM, token=TOKEN)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        assert unseal(bytes(changed), token=TOKEN) is None
    assert [unseal(data[:length], token=TOKEN) for length in range(len(data))] == [None] * len(data)
    assert unseal(data + b" ", token=TOKEN) is None


@given(st.binary(max_size=600))
def test_noise_is_not_heard(data: bytes) -> None:
    assert unseal(data, token=TOKEN) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"3",
        b"{}",
        b"[]",
        b'["a", 1, true]',
        b'["a", "b", 1, 1]',
        b'["a", "b", 1, 1, true, 4]',
        b'["a", "b", true, 1, true]',
        b'["a", "b", 1, true, true]',
        b'["a", "b", 1.0, 1, true]',
        b'["a", "b", 1, 1.0, true]',
        b'["a", "b", 1, 1, 1]',
        b'["a", "b", 1, 1, null]',
        b'["a", 2, 1, 1, true]',
        b'[1, "b", 1, 1, true]',
        b'"abcde"',
        b'{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}',
        b"\xff",
        b"[" * 490,
    ],
    ids=repr,
)
def test_what_another_release_may_sign_is_not_misread(body: bytes) -> None:
    signature = hmac.new(TOKEN, body, hashlib.sha256).digest()[:16]
    assert unseal(signature + b'["a", "b", 1, 1, true]', token=TOKEN) is None
    assert unseal(signature + body, token=TOKEN) is None


def test_a_word_fits_into_any_frame_and_a_larger_one_is_none() -> None:
    longest = HeartbeatDatagram("h" * 64 + "-0a1b2c3d", "t" * 64 + "-0a1b2c3d", 10**12, 999_999_999, ended=False)
    assert len(seal(longest, token=TOKEN)) < 300
    assert unseal(seal(replace(longest, host="h" * 600), token=TOKEN), token=TOKEN) is None


def passes(last: dict[str, int], datagram: HeartbeatDatagram) -> bool:
    """Whether it does for launcher `b`, after what it has received so far."""
    return is_new(datagram, last, own="b")


def test_a_word_passes_once_and_no_older_one_after_it() -> None:
    last: dict[str, int] = {}
    datagram = HeartbeatDatagram("a", "b", 5, 1, ended=False)
    assert passes(last, datagram)
    assert not passes(last, datagram)
    assert not passes(last, replace(datagram, counter=4, ended=True))
    assert passes(last, replace(datagram, counter=6))
    assert passes(last, replace(datagram, host="c", counter=1))
    assert not passes(last, replace(datagram, to="another", counter=7))


def test_who_has_the_token_cannot_fill_the_memory_and_who_is_heard_stays_known() -> None:
    last: dict[str, int] = {}
    friend = HeartbeatDatagram("friend", "b", 0, 1, ended=False)
    for number in range(1, 10_001):
        assert passes(last, HeartbeatDatagram(f"h{number}", "b", 1, 1, ended=False))
        if number % 1000 == 1:
            friend = replace(friend, counter=number)
            assert passes(last, friend)
    assert not passes(last, friend)
    assert passes(last, HeartbeatDatagram("h1", "b", 1, 1, ended=False))
