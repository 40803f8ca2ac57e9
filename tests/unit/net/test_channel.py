"""A channel takes what is as it must be, and says of everything else what is wrong with it."""

import socket
import struct
import time
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastictrain.net.channel import FRAME_BYTES, MOST_JSON_BYTES, Channel, ChannelError

Ends = tuple[socket.socket, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A socket, and a channel at its other end."""
    near, far = socket.socketpair()
    with near:
        channel = Channel(far)
        yield near, channel
        channel.close()


def head(kind: bytes, body: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<cQ16s", kind, len(body) if length is None else length, xxhash.xxh3_128_digest(body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5), st.binary(min_size=1, max_size=5000))
def test_there_and_back(ends: Ends, value: dict[str, object], data: bytes) -> None:
    near, channel = ends
    other = Channel(near)
    other.send_json(value, limit_s=1.0)
    other.send_data(memoryview(data), limit_s=1.0)
    assert channel.receive_json(limit_s=1.0) == value
    buffer = bytearray(len(data) + 3)
    assert channel.receive_data(memoryview(buffer), limit_s=1.0) == len(data)
    assert buffer == data + b"\0\0\0"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (head(b"X", b"{}") + b"{}", "must be of kind b'J', but is of kind b'X'"),
        (head(b"D", b"{}") + b"{}", "must be of kind b'J', but is of kind b'D'"),
        (head(b"J", b"", length=MOST_JSON_BYTES + 1), f"at most {MOST_JSON_BYTES} bytes, but announces {MOST_JSON_BYTES + 1}"),
        (head(b"J", b"{}") + b"[]", "a message was garbled"),
        (head(b"J", b"{") + b"{", "is no JSON"),
        (head(b"J", b"[" * 99999) + b"[" * 99999, "is no JSON"),
        (head(b"J", b"1") + b"1", "must be an object, but is int"),
        (head(b"J", b"{}")[:9], "hung up"),
    ],
)
def test_what_is_no_message(ends: Ends, sent: bytes, words: str) -> None:
    near, channel = ends
    near.sendall(sent)
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError, match=words):
        channel.receive_json(limit_s=1.0)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (head(b"J", b"{}") + b"{}", "must be of kind b'D', but is of kind b'J'"),
        (head(b"D", b"123456") + b"123456", "at most 5 bytes, but announces 6"),
        (head(b"D", b""), "no bytes"),
        (head(b"D", b"12345") + b"12346", "bytes were garbled"),
        (head(b"D", b"12345") + b"1234", "hung up"),
    ],
)
def test_what_are_no_bytes(ends: Ends, sent: bytes, words: str) -> None:
    near, channel = ends
    near.sendall(sent)
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError, match=words):
        channel.receive_data(memoryview(bytearray(5)), limit_s=1.0)


def test_a_frame_has_its_bound_however_large_the_buffer(ends: Ends) -> None:
    near, channel = ends
    near.sendall(head(b"D", b"", length=FRAME_BYTES + 1))
    with pytest.raises(ChannelError, match=f"at most {FRAME_BYTES} bytes"):
        channel.receive_data(memoryview(bytearray(2 * FRAME_BYTES)), limit_s=1.0)


def test_who_says_nothing_is_too_slow(ends: Ends) -> None:
    _, channel = ends
    began = time.monotonic()
    with pytest.raises(ChannelError, match="no answer"):
        channel.receive_json(limit_s=0.05)
    with pytest.raises(ChannelError, match=r"0\.1 s"):
        channel.receive_json(limit_s=0.05, idle_s=0.1)
    assert 0.1 < time.monotonic() - began < 1


def test_who_does_not_read_is_too_slow(ends: Ends) -> None:
    _, channel = ends
    with pytest.raises(ChannelError, match="no answer"):
        channel.send(bytes(64 * FRAME_BYTES), limit_s=0.05)


def test_breaking_off_ends_what_comes_after(ends: Ends) -> None:
    _, channel = ends
    channel.break_off()
    with pytest.raises(ChannelError):
        channel.receive_json(limit_s=1.0)
    with pytest.raises(ChannelError):
        channel.send_json({}, limit_s=1.0)
