"""What launchers send each other, signed with the run's token. Pure."""

import hashlib
import hmac
import json
from dataclasses import dataclass

_SIGNATURE_BYTES = 16
_LARGEST_BYTES = 512
"""Fits into the smallest frame that any network has: a path that swallows large ones must not silence this."""


@dataclass(frozen=True, slots=True)
class Word:
    """A sign of life."""

    host: str
    generation: int
    """The newest one that this host knows."""

    ended: bool
    """Whether it has ended in the eyes of this host: storage then tells why."""


def seal(word: Word, *, token: bytes) -> bytes:
    """One datagram."""
    body = json.dumps([word.host, word.generation, word.ended]).encode()
    return _signature(body, token) + body


def unseal(data: bytes, *, token: bytes) -> Word | None:
    """The word in a datagram; None if it is of another run, or none at all."""
    signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if len(data) > _LARGEST_BYTES or not hmac.compare_digest(signature, _signature(body, token)):
        return None
    try:
        host, generation, ended = json.loads(body)
    except (ValueError, TypeError):
        return None
    if isinstance(host, str) and type(generation) is int and isinstance(ended, bool):
        return Word(host, generation, ended)
    return None


def _signature(body: bytes, token: bytes) -> bytes:
    return hmac.new(token, body, hashlib.sha256).digest()[:_SIGNATURE_BYTES]
