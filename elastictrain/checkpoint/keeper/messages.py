"""What workers and their keeper say to each other: one JSON object per line over a Unix socket. Pure."""

import json
from collections.abc import Iterator
from typing import TypeAlias

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.manifest import JsonValue

Message: TypeAlias = dict[str, JsonValue]

LONGEST_BYTES = 1 << 20
_MOST = 1 << 63
SOCKET_NAME = "keeper.sock"
LOCK_NAME = "keeper.lock"
FACTS_NAME = "run.json"
LOG_NAME = "keeper.log"


class MalformedError(ValueError):
    """The other side does not speak our language."""


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Puts messages together from what a socket gives."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole now. Raises: MalformedError."""
        self._waiting += data
        while (end := self._waiting.find(b"\n")) >= 0:
            line = bytes(self._waiting[:end])
            del self._waiting[: end + 1]
            yield _message(line)
        if len(self._waiting) > LONGEST_BYTES:
            raise MalformedError(f"a message has more than {LONGEST_BYTES} bytes")


def _message(line: bytes) -> Message:
    try:
        message = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"a message is no JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise MalformedError("a message must be an object with the text `op`")
    return message


def count(message: Message, name: str) -> int:
    """A field that must be a whole number >= 0, and below 2^63. Raises: MalformedError."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise MalformedError(f"`{name}` of {message.get('op')!r} must be a count, but is {value!r}")
    return value


def text(message: Message, name: str) -> str:
    """A field that must be a text. Raises: MalformedError."""
    value = message.get(name)
    if not isinstance(value, str):
        raise MalformedError(f"`{name}` of {message.get('op')!r} must be a text, but is {value!r}")
    return value
