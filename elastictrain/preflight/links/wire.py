"""What a host's responder and those who ask it say to each other: a handshake under the preflight's token, then bytes.

The token and the nonces keep strangers and predecessors out, and show that the host at an address is the one that introduced
itself. Nothing is encrypted: there is nothing in it.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.errors import TransportError

CHUNK_BYTES = 1 << 20

ECHO, SINK, GIVE = b"E", b"S", b"G"
REQUEST = struct.Struct("<cdQ")
"""What is wanted, for how many seconds, and at most how many bytes (0: no matter)."""

PING = struct.Struct("<d")
PONG = struct.Struct("<dd")
"""When the question came, and when the answer left, by the clock of the one that answers."""

RECEIPT = struct.Struct("<Qdd")
"""Bytes that came, the best rate on the way in bytes per second, and the part of the time without a processor."""

TRAILER = struct.Struct("<d")
"""The end of what is given: the part of the time without a processor."""

_MAGIC = b"ETLINK01"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_FRAME = struct.Struct("<4scII")
_FRAME_MAGIC = b"ETfr"
_FRAME_MAC_BYTES = 16
_PROBE, _ACK = b"P", b"A"


class LineError(TransportError):
    """A connection broke, was too slow, or brought what is not expected; the message says which in a few words."""


class StrangerError(LineError):
    """The one that answers is not the host that introduced itself with this address."""


class Line:
    """One TCP connection; everything on it has a limit in time. For one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise _broken(error) from error

    def send(self, data: bytes | memoryview, *, limit_s: float) -> None:
        """All of it. Raises: LineError."""
        try:
            self._socket.settimeout(max(limit_s, 0.001))
            self._socket.sendall(data)
        except OSError as error:
            raise _broken(error) from error

    def send_some(self, data: memoryview, *, limit_s: float) -> int:
        """What finds room. Raises: LineError."""
        try:
            self._socket.settimeout(max(limit_s, 0.001))
            return self._socket.send(data)
        except OSError as error:
            raise _broken(error) from error

    def receive(self, count: int, *, limit_s: float) -> bytes:
        """Exactly so many bytes. Raises: LineError."""
        deadline = time.monotonic() + limit_s
        data = bytearray(count)
        filled = 0
        while filled < count:
            got = self.receive_into(memoryview(data)[filled:], limit_s=deadline - time.monotonic())
            if not got:
                raise LineError("hung up")
            filled += got
        return bytes(data)

    def receive_into(self, buffer: memoryview, *, limit_s: float) -> int:
        """What there is; 0 at the end. Raises: LineError."""
        try:
            self._socket.settimeout(max(limit_s, 0.001))
            return self._socket.recv_into(buffer)
        except OSError as error:
            raise _broken(error) from error

    def end_sending(self) -> None:
        """The other side reads the end. Raises: LineError."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise _broken(error) from error


@dataclass(frozen=True, slots=True)
class Secret:
    """What two sides must share: the token, and of the responder its nonce."""

    token: bytes
    nonce: bytes

    def proof(self, role: bytes, *challenges: bytes) -> bytes:
        """That one knows them. The role keeps one side's proof from being sent back as the other's."""
        return hmac.digest(self.token, b"|".join((role, self.nonce.hex().encode(), *challenges)), "sha256")


class ResponderHandshake:
    """The responder's side of the handshake."""

    num_bytes = len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES

    def __init__(self, secret: Callable[[], Secret | None]) -> None:
        """`secret` is asked when the proof has come."""
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    @property
    def greeting(self) -> bytes:
        return _MAGIC + self._nonce

    def answer(self, heard: bytes) -> bytes | None:
        magic, theirs, proof = heard[: len(_MAGIC)], heard[len(_MAGIC) : -_PROOF_BYTES], heard[-_PROOF_BYTES:]
        secret = self._secret()
        if secret is None or magic != _MAGIC:
            return None
        # What the client holds against us is our nonce; it must find out that we are another host, so it is not in its proof.
        expected = Secret(secret.token, b"").proof(b"client", self._nonce, theirs)
        return secret.proof(b"responder", self._nonce, theirs) if hmac.compare_digest(proof, expected) else None


def introduce(line: Line, secret: Secret, *, limit_s: float) -> None:
    """The asking side. Raises: LineError; StrangerError if the other one is not who it should be."""
    deadline = time.monotonic() + limit_s
    opening = line.receive(len(_MAGIC) + _NONCE_BYTES, limit_s=limit_s)
    if not opening.startswith(_MAGIC):
        raise StrangerError("something else answers there")
    theirs, ours = opening[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    proof = Secret(secret.token, b"").proof(b"client", theirs, ours)
    line.send(_MAGIC + ours + proof, limit_s=deadline - time.monotonic())
    answer = line.receive(_PROOF_BYTES, limit_s=deadline - time.monotonic())
    if not hmac.compare_digest(answer, secret.proof(b"responder", theirs, ours)):
        raise StrangerError("another host answers at this address")


FRAME_BYTES = _FRAME.size + _FRAME_MAC_BYTES
"""The least that a datagram must have."""


def probe_frame(secret: Secret, number: int, *, size: int) -> bytes:
    """A datagram of `size` bytes (at least `FRAME_BYTES`)."""
    return _frame(secret, _PROBE, number, size).ljust(size, b"\0")


def answer_frame(secret: Secret, data: bytes) -> bytes | None:
    """What to answer to a datagram; None for one that is no probe under this token. Never more than came."""
    number = _read(secret, _PROBE, data)
    return None if number is None or number[1] != len(data) else _frame(secret, _ACK, number[0], len(data))


def read_answer(secret: Secret, data: bytes) -> int | None:
    """The number of the probe that arrived; None if it is no answer to one."""
    found = _read(secret, _ACK, data)
    return None if found is None else found[0]


def _frame(secret: Secret, kind: bytes, number: int, size: int) -> bytes:
    head = _FRAME.pack(_FRAME_MAGIC, kind, number, size)
    return head + secret.proof(b"frame", head)[:_FRAME_MAC_BYTES]


def _read(secret: Secret, kind: bytes, data: bytes) -> tuple[int, int] | None:
    if len(data) < FRAME_BYTES:
        return None
    head, mac = data[: _FRAME.size], data[_FRAME.size : FRAME_BYTES]
    magic, found, number, size = _FRAME.unpack(head)
    if magic != _FRAME_MAGIC or found != kind or not hmac.compare_digest(mac, secret.proof(b"frame", head)[:_FRAME_MAC_BYTES]):
        return None
    return number, size


def _broken(error: OSError) -> LineError:
    if isinstance(error, TimeoutError):
        return LineError("no answer")
    if isinstance(error, ConnectionRefusedError):
        return LineError("refused")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return LineError("hung up")
    return LineError((error.strerror or type(error).__name__).lower())


def connect(address: str, port: int, *, source: str, limit_s: float) -> socket.socket:
    """A connection from our address `source` (any, if it is empty). Raises: LineError."""
    try:
        return socket.create_connection((address, port), timeout=limit_s, source_address=(source, 0) if source else None)
    except OSError as error:
        raise _broken(error) from error
