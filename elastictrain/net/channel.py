"""One connection between hosts of a run: the handshake, then frames of JSON or raw bytes over TCP.

A frame is its kind (1 byte), the length of its body (8 bytes, little endian), the xxh3_128 of its body (16 bytes) and the body.
The token keeps out strangers and processes of an earlier run, and digests detect garbled data. Nothing is encrypted: an
attacker who can change packets between two hosts is not stopped. A violation of the protocol ends its connection and nothing
else.
"""

import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from elastictrain.errors import TransportError
from elastictrain.net.tcp_info import TcpCounters, read_counters

FRAME_BYTES = 1 << 20  # most bytes in one frame of raw bytes
MOST_JSON_BYTES = 64 << 20
SIGNATURE_BYTES = 16
PROOF_BYTES = 32
_HEAD = struct.Struct("<cQ16s")
_JSON, _DATA = b"J", b"D"
_SO_MAX_PACING_RATE = 47  # Python's socket module has no name for it


class ChannelError(TransportError):
    """The connection broke, was too slow, or violated the protocol; the message names the cause."""


class StrangerError(ChannelError):
    """The other end is not the intended host."""


class Channel:
    """One TCP connection; owned by one thread at a time. Every wait has a limit in seconds. Methods raise ChannelError."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes | memoryview, *, limit_s: float, flags: int = 0) -> None:
        """Send all of `data`, outside of frames. Raises: ChannelError."""
        with _channel_errors():
            self._socket.settimeout(max(limit_s, 0.001))
            self._socket.sendall(data, flags)

    def send_some(self, data: memoryview, *, limit_s: float) -> int:
        """Send as many bytes as find room, outside of frames. Raises: ChannelError."""
        with _channel_errors():
            self._socket.settimeout(max(limit_s, 0.001))
            return self._socket.send(data)

    def send_gently(self, *, in_flight_bytes: int, bytes_per_s: int) -> None:
        """From now on about so many bytes are on the way at a time, and no more are sent in a second. Raises: ChannelError."""
        with _channel_errors():
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, in_flight_bytes)
            with suppress(OSError):  # Linux
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)

    def counters(self) -> TcpCounters | None:
        return read_counters(self._socket)

    def end_sending(self) -> None:
        """Half-close: the other side reads the end. Raises: ChannelError."""
        with _channel_errors():
            self._socket.shutdown(socket.SHUT_WR)

    def receive(self, count: int, *, limit_s: float) -> bytes:
        """Receive exactly `count` bytes, outside of frames. Raises: ChannelError."""
        buffer = bytearray(count)
        self._fill(memoryview(buffer), deadline=time.monotonic() + limit_s)
        return bytes(buffer)

    def receive_some(self, buffer: memoryview, *, limit_s: float) -> int:
        """Receive the bytes that have arrived, outside of frames; 0 at the end. Raises: ChannelError."""
        with _channel_errors():
            self._socket.settimeout(max(limit_s, 0.001))
            return self._socket.recv_into(buffer)

    def send_json(self, value: Mapping[str, object], *, limit_s: float) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        if len(body) > MOST_JSON_BYTES:
            raise ChannelError(f"a message must have at most {MOST_JSON_BYTES} bytes, but has {len(body)}")
        self._send_frame(_JSON, memoryview(body), limit_s=limit_s)

    def send_data(self, data: memoryview, *, limit_s: float) -> None:
        """One frame of at most `FRAME_BYTES`. Raises: ChannelError."""
        self._send_frame(_DATA, data, limit_s=limit_s)

    def receive_json(self, *, limit_s: float, idle_s: float = 0.0) -> dict[str, Any]:
        """Receive an object. It may begin up to `idle_s` late, if that is longer. Raises: ChannelError."""
        if idle_s > limit_s:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1000 * idle_s):
                raise ChannelError(f"nothing came for {idle_s:g} s")
        deadline = time.monotonic() + limit_s
        length, digest = self._receive_head(_JSON, max_bytes=MOST_JSON_BYTES, deadline=deadline)
        # Memory grows with the received bytes, not with the announced length.
        body = bytearray()
        while len(body) < length:
            part = memoryview(bytearray(min(FRAME_BYTES, length - len(body))))
            self._fill(part, deadline=deadline)
            body += part
        if xxhash.xxh3_128_digest(body) != digest:
            raise ChannelError("a message was garbled on the way")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"a message is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ChannelError(f"a message must be an object, but is {type(value).__name__}")
        return value

    def receive_data(self, buffer: memoryview, *, limit_s: float) -> int:
        """Fill the beginning of `buffer` from one frame; return the frame's size. Raises: ChannelError."""
        deadline = time.monotonic() + limit_s
        length, digest = self._receive_head(_DATA, max_bytes=min(len(buffer), FRAME_BYTES), deadline=deadline)
        if not length:
            raise ChannelError("a frame of no bytes came")
        part = buffer[:length]
        self._fill(part, deadline=deadline)
        if xxhash.xxh3_128_digest(part) != digest:
            raise ChannelError("bytes were garbled on the way")
        return length

    def break_off(self) -> None:
        """From another thread: end whatever the owner waits for on this connection, with a ChannelError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up. Owner only: the freed descriptor number could be another connection's before the owner notices."""
        self.break_off()
        self._socket.close()

    def _send_frame(self, kind: bytes, body: memoryview, *, limit_s: float) -> None:
        head = _HEAD.pack(kind, len(body), xxhash.xxh3_128_digest(body))
        self.send(head, limit_s=limit_s, flags=socket.MSG_MORE)
        self.send(body, limit_s=limit_s)

    def _receive_head(self, kind: bytes, *, max_bytes: int, deadline: float) -> tuple[int, bytes]:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head), deadline=deadline)
        found, length, digest = _HEAD.unpack(head)
        if found != kind:
            raise ChannelError(f"a frame must be of kind {kind!r}, but is of kind {found!r}")
        if length > max_bytes:
            raise ChannelError(f"a frame must have at most {max_bytes} bytes, but announces {length}")
        return length, digest

    def _fill(self, buffer: memoryview, *, deadline: float) -> None:
        filled = 0
        while filled < len(buffer):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ChannelError("no answer")
            count = self.receive_some(buffer[filled:], limit_s=left_s)
            if not count:
                raise ChannelError("hung up")
            filled += count


def connect(address: str, port: int, *, limit_s: float, source: str = "") -> Channel:
    """Connect, from the local address `source` if given. Raises: ChannelError."""
    with _channel_errors():
        return Channel(
            socket.create_connection((address, port), timeout=limit_s, source_address=(source, 0) if source else None)
        )


@contextmanager
def _channel_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ChannelError("no answer") from error
    except ConnectionRefusedError as error:
        raise ChannelError("refused") from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise ChannelError("hung up") from error
    except OSError as error:
        raise ChannelError((error.strerror or str(error) or type(error).__name__).lower()) from error


@dataclass(frozen=True, slots=True)
class Secret:
    """The token, and the two roles, which keep one side's proof from being sent back as the other's."""

    token: bytes
    client: bytes = b"client"
    server: bytes = b"server"


@dataclass(frozen=True, slots=True)
class Handshake:
    """The handshake of one protocol: each side sends a nonce, and proves under both nonces that it knows the secret."""

    magic: bytes
    nonce_bytes: int
    separator: bytes = b""

    def greeting(self) -> bytes:
        """A side's first message, the server's before the client's: the magic number and a nonce."""
        return self.magic + secrets.token_bytes(self.nonce_bytes)

    def introduce(self, channel: Channel, secret: Secret, *, limit_s: float) -> None:
        """Authenticate as the client. Raises: ChannelError; StrangerError if the server does not know the secret."""
        deadline, answer = time.monotonic() + limit_s, self.greeting()
        greeting = channel.receive(len(answer), limit_s=limit_s)
        if not greeting.startswith(self.magic):
            begin = greeting[: len(self.magic)]
            raise StrangerError(f"something else answers there, or another release: it begins with {begin!r}")
        proof = self._proof(secret.token, secret.client, greeting, answer)
        channel.send(answer + proof, limit_s=deadline - time.monotonic())
        try:
            proof = channel.receive(PROOF_BYTES, limit_s=deadline - time.monotonic())
        except ChannelError as error:
            raise ChannelError(f"it does not take the token, or left ({error})") from error
        if not hmac.compare_digest(proof, self._proof(secret.token, secret.server, greeting, answer)):
            raise StrangerError("another host answers at this address, which does not know the token")

    def prove(self, secret: Secret, *, greeting: bytes, received: bytes) -> bytes | None:
        """The server's answer to a client that knows the secret; None for any other client."""
        answer, proof = received[:-PROOF_BYTES], received[-PROOF_BYTES:]
        expected = self._proof(secret.token, secret.client, greeting, answer)
        if not answer.startswith(self.magic) or not hmac.compare_digest(proof, expected):
            return None
        return self._proof(secret.token, secret.server, greeting, answer)

    def _proof(self, token: bytes, role: bytes, server_greeting: bytes, client_answer: bytes) -> bytes:
        nonces = (greeting[len(self.magic) :] for greeting in (server_greeting, client_answer))
        return hmac.digest(token, self.separator.join((role, *nonces)), "sha256")


def signature(data: bytes, token: bytes) -> bytes:
    """The signature of a datagram, `SIGNATURE_BYTES` long."""
    return hmac.digest(token, data, "sha256")[:SIGNATURE_BYTES]
