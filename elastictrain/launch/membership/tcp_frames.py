"""Frames between a launcher and the host that serves the roster.

A frame is the length of its body (4 bytes, big endian), an HMAC-SHA256 and the body: the length of a header (4 bytes), the
header, which is a JSON object, and bytes. The key of the HMAC is made of the run's token and of a nonce of each side, and it
covers the direction and the number of the frame: what was recorded on one connection means nothing on another one, nor a second
time on the same. Nothing is encrypted. What is not as it must be ends its connection, and nothing else.
"""

import hmac
import json
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastictrain.checkpoint.peers.wire import Channel, WireError

Json = str | int | float | bool | list["Json"] | None

REQUEST_BYTES = (1 << 20) + 4096
"""With a generation of some thousand hosts."""

ANSWER_BYTES = 16 << 20

_MAGIC = b"ETROST01"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_PIECE_BYTES = 1 << 16
_FROM_CLIENT, _FROM_SERVER = b"client", b"server"


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer."""

    header: Mapping[str, Json]
    data: bytes = b""


class Frames:
    """Both directions of one connection, once the nonces are known."""

    def __init__(
        self, channel: Channel, *, key: bytes, says: bytes, hears: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._key = key
        self._says, self._hears = says, hears
        self._said = self._heard = 0

    def send(self, message: Message, *, limit_s: float) -> None:
        """Raises: WireError."""
        header = json.dumps(message.header, separators=(",", ":")).encode()
        body = _LENGTH.pack(len(header)) + header + message.data
        proof = self._proof(self._says, self._said, body)
        self._said += 1
        self._channel.send_raw(_LENGTH.pack(len(body)) + proof + body, limit_s=limit_s)

    def receive(self, *, most_bytes: int, limit_s: float, idle_s: float = 0.0) -> Message:
        """All of it within `limit_s`, which begins with its first bytes if it may be `idle_s` late. Raises: WireError."""
        deadline_s = self._clock() + limit_s
        (length,) = _LENGTH.unpack(self._channel.receive_raw(_LENGTH.size, limit_s=idle_s or limit_s))
        if idle_s:
            deadline_s = self._clock() + limit_s
        if length > most_bytes:
            raise WireError(f"a frame must have at most {most_bytes} bytes, but announces {length}")
        proof = self._channel.receive_raw(_PROOF_BYTES, limit_s=deadline_s - self._clock())
        # The memory grows with what has come, not with what was promised.
        body = bytearray()
        while len(body) < length:
            count = min(_PIECE_BYTES, length - len(body))
            body += self._channel.receive_raw(count, limit_s=deadline_s - self._clock())
        if not hmac.compare_digest(proof, self._proof(self._hears, self._heard, body)):
            raise WireError("a frame is not signed with the token of this run")
        self._heard += 1
        return _unpack(bytes(body))

    def _proof(self, direction: bytes, number: int, body: bytes | bytearray) -> bytes:
        return hmac.digest(self._key, direction + _NUMBER.pack(number) + body, "sha256")


def begin_as_client(channel: Channel, token: bytes, *, limit_s: float) -> Frames:
    """What the server is shows in its first answer. Raises: WireError."""
    theirs, ours = _read_nonce(channel, limit_s=limit_s), secrets.token_bytes(_NONCE_BYTES)
    channel.send_raw(_MAGIC + ours, limit_s=limit_s)
    return Frames(channel, key=_key(token, theirs, ours), says=_FROM_CLIENT, hears=_FROM_SERVER)


def begin_as_server(channel: Channel, token: bytes, *, limit_s: float) -> Frames:
    """What the client is shows in its first request. Raises: WireError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    channel.send_raw(_MAGIC + ours, limit_s=limit_s)
    theirs = _read_nonce(channel, limit_s=limit_s)
    return Frames(channel, key=_key(token, ours, theirs), says=_FROM_SERVER, hears=_FROM_CLIENT)


def _read_nonce(channel: Channel, *, limit_s: float) -> bytes:
    begin = channel.receive_raw(len(_MAGIC) + _NONCE_BYTES, limit_s=limit_s)
    if not begin.startswith(_MAGIC):
        raise WireError(f"what answers there is no roster, or one of another release: it begins with {begin[: len(_MAGIC)]!r}")
    return begin[len(_MAGIC) :]


def _key(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, b"roster" + server_nonce + client_nonce, "sha256")


def _unpack(body: bytes) -> Message:
    if len(body) < _LENGTH.size:
        raise WireError("a frame has no header")
    (length,) = _LENGTH.unpack_from(body)
    try:
        header = json.loads(body[_LENGTH.size : _LENGTH.size + length])
    except (ValueError, RecursionError) as error:
        raise WireError(f"a header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise WireError(f"a header must be an object, but is {type(header).__name__}")
    return Message(header, body[_LENGTH.size + length :])
