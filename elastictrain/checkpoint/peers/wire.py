"""What peers send each other: a handshake under the run's token, then frames of JSON or raw bytes over TCP.

A frame is its kind (1 byte), the length of its body (8 bytes, little endian), the xxh3_128 of its body (16 bytes) and the body.
The token keeps strangers and predecessors out, and digests find what is garbled on the way; nothing is encrypted, and who can
change packets between two hosts is not held off. Whatever is not as it must be ends that connection, and nothing else.
"""

import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from elastictrain.checkpoint.manifest import JsonValue

FRAME_BYTES = 1 << 20
"""Most bytes in one frame of raw bytes."""

MOST_JSON_BYTES = 64 << 20

_MAGIC = b"ETPEER01"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct("<cQ16s")
_JSON, _DATA = b"J", b"D"


class WireError(Exception):
    """The connection broke, was too slow, or brought what the protocol does not allow."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one side waits for the other, in seconds; all of what is waited for must have come by then."""

    connect_s: float = 5.0

    handshake_s: float = 5.0
    """Of the side that asks; the other one gives it two seconds at most."""

    io_s: float = 30.0
    """One frame, or the answer to a request."""

    prepare_s: float = 180.0
    """Making room for a replica: the system clears the memory first."""

    idle_s: float = 60.0
    """A connection without a request."""


class Channel:
    """One connection; owned by one thread at a time."""

    def __init__(self, connection: socket.socket, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = connection
        self._clock = clock
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_json(self, value: dict[str, JsonValue], *, limit_s: float) -> None:
        """Raises: WireError."""
        body = json.dumps(value, separators=(",", ":")).encode()
        if len(body) > MOST_JSON_BYTES:
            raise WireError(f"a message must have at most {MOST_JSON_BYTES} bytes, but has {len(body)}")
        self._send_frame(_JSON, memoryview(body), limit_s=limit_s)

    def send_data(self, data: memoryview, *, limit_s: float) -> None:
        """One frame of at most `FRAME_BYTES`. Raises: WireError."""
        self._send_frame(_DATA, data, limit_s=limit_s)

    def receive_json(self, *, limit_s: float, idle_s: float = 0.0) -> dict[str, JsonValue]:
        """An object. It may be `idle_s` late in beginning, if that is longer. Raises: WireError."""
        if idle_s > limit_s:
            self._wait(idle_s)
        deadline = self._clock() + limit_s
        length, digest = self._receive_head(_JSON, most_bytes=MOST_JSON_BYTES, deadline=deadline)
        # The memory grows with what has come, not with what was promised.
        body = bytearray()
        while len(body) < length:
            part = memoryview(bytearray(min(FRAME_BYTES, length - len(body))))
            self._fill(part, deadline=deadline)
            body += part
        if xxhash.xxh3_128_digest(body) != digest:
            raise WireError("a message was garbled on the way")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise WireError(f"a message must be an object, but is {type(value).__name__}")
        return value

    def receive_data(self, buffer: memoryview, *, limit_s: float) -> int:
        """Fills the beginning of `buffer` from one frame; returns the bytes it had. Raises: WireError."""
        deadline = self._clock() + limit_s
        length, digest = self._receive_head(_DATA, most_bytes=min(len(buffer), FRAME_BYTES), deadline=deadline)
        if not length:
            raise WireError("a frame of no bytes came")
        part = buffer[:length]
        self._fill(part, deadline=deadline)
        if xxhash.xxh3_128_digest(part) != digest:
            raise WireError("bytes were garbled on the way")
        return length

    def has_something(self) -> bool:
        """Whether the other side has said something, or hung up."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send_raw(self, data: bytes, *, limit_s: float) -> None:
        """Bytes outside of frames. Raises: WireError."""
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(data)
        except OSError as error:
            raise _broken(error) from error

    def receive_raw(self, count: int, *, limit_s: float) -> bytes:
        """Bytes outside of frames. Raises: WireError."""
        buffer = bytearray(count)
        self._fill(memoryview(buffer), deadline=self._clock() + limit_s)
        return bytes(buffer)

    def break_off(self) -> None:
        """From another thread: whatever its owner is waiting for on this connection ends with a WireError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up. Only the owner does: a number that is free again could be another connection's before he notices."""
        self.break_off()
        self._socket.close()

    def _send_frame(self, kind: bytes, body: memoryview, *, limit_s: float) -> None:
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(_HEAD.pack(kind, len(body), xxhash.xxh3_128_digest(body)), socket.MSG_MORE)
            self._socket.sendall(body)
        except OSError as error:
            raise _broken(error) from error

    def _receive_head(self, kind: bytes, *, most_bytes: int, deadline: float) -> tuple[int, bytes]:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head), deadline=deadline)
        found, length, digest = _HEAD.unpack(head)
        if found != kind:
            raise WireError(f"a frame must be of kind {kind!r}, but is of kind {found!r}")
        if length > most_bytes:
            raise WireError(f"a frame must have at most {most_bytes} bytes, but announces {length}")
        return length, digest

    def _wait(self, idle_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(1000 * idle_s):
            raise WireError(f"nothing came for {idle_s:g} s")

    def _fill(self, buffer: memoryview, *, deadline: float) -> None:
        filled = 0
        try:
            while filled < len(buffer):
                left_s = deadline - self._clock()
                if left_s <= 0:
                    raise WireError("the other side is too slow")
                self._socket.settimeout(left_s)
                count = self._socket.recv_into(buffer[filled:])
                if not count:
                    raise WireError("the other side hung up")
                filled += count
        except OSError as error:
            raise _broken(error) from error


def introduce(channel: Channel, token: bytes, *, limit_s: float) -> None:
    """The client's side of the handshake. Raises: WireError, also if the other side does not know the token."""
    theirs = _read_nonce(channel, limit_s=limit_s)
    ours = secrets.token_bytes(_NONCE_BYTES)
    channel.send_raw(_MAGIC + ours + _proof(token, b"client", theirs, ours), limit_s=limit_s)
    try:
        proof = channel.receive_raw(_PROOF_BYTES, limit_s=limit_s)
    except WireError as error:
        raise WireError(f"it does not take the token of this incarnation, or left ({error})") from error
    if not hmac.compare_digest(proof, _proof(token, b"server", theirs, ours)):
        raise WireError("it does not know the token of this incarnation")


class PeerHandshake:
    """The server's side of the handshake. While there is no token, nobody is let in."""

    num_bytes = len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES

    def __init__(self, token: Callable[[], bytes | None]) -> None:
        """`token` is asked when the proof has come."""
        self._token = token
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.used: bytes | None = None
        """The token that the other side has proven to have."""

    @property
    def greeting(self) -> bytes:
        return _MAGIC + self._nonce

    def answer(self, heard: bytes) -> bytes | None:
        magic, theirs, proof = heard[: len(_MAGIC)], heard[len(_MAGIC) : -_PROOF_BYTES], heard[-_PROOF_BYTES:]
        known = self._token()
        if known is None or magic != _MAGIC or not hmac.compare_digest(proof, _proof(known, b"client", self._nonce, theirs)):
            return None
        self.used = known
        return _proof(known, b"server", self._nonce, theirs)


def _read_nonce(channel: Channel, *, limit_s: float) -> bytes:
    begin = channel.receive_raw(len(_MAGIC) + _NONCE_BYTES, limit_s=limit_s)
    if not begin.startswith(_MAGIC):
        raise WireError(f"it begins with {begin[: len(_MAGIC)]!r}, not with {_MAGIC!r}: it is no peer, or of another release")
    return begin[len(_MAGIC) :]


def _proof(token: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # The role keeps one side's proof from being sent back as the other's.
    return hmac.digest(token, role + server_nonce + client_nonce, "sha256")


def _broken(error: OSError) -> WireError:
    if isinstance(error, TimeoutError):
        return WireError("the other side is too slow")
    return WireError(error.strerror or str(error) or type(error).__name__)
