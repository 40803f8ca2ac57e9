"""JSON from storage, files and peers, parsed within bounds.

`json.loads` accepts what no writer of this project produces: a number of 5,000 digits, `NaN`, 200,000 nested brackets,
duplicate keys. Each is refused here before any caller computes with it.
"""

import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_INTEGER_DIGITS = 20  # enough for every 64-bit integer with its sign
_LONG_DIGITS = re.compile(r"[0-9]{20}")

# msgspec caches what it derives from a class at first use. Two threads that do so at once crash the process, since one reads
# the other's partial entry (msgspec 0.22).
_KINDS_LOCK = threading.Lock()

_known_kinds: set[object] = set()
os.register_at_fork(before=_KINDS_LOCK.acquire, after_in_parent=_KINDS_LOCK.release, after_in_child=_KINDS_LOCK.release)


class MalformedJsonError(ValueError):
    """The bytes are no JSON within the limits; the message completes a sentence that begins with the name of their file."""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits of one document. Brackets, commas and colons count as values: Python needs up to 100 bytes for each."""

    max_bytes: int
    max_values: int
    max_depth: int = 32


RECORD = JsonLimits(max_bytes=1 << 20, max_values=1 << 18)  # for a mark, a line of a log, an order, a record
# For what grows with the number of tensors and ranks: manifests, layouts, digests, headers of shard files.
DOCUMENT = JsonLimits(max_bytes=256 << 20, max_values=16 << 20)


def parse_json(data: bytes | bytearray | memoryview | str, *, limits: JsonLimits = RECORD) -> Any:
    """Parse `data`: finite numbers, 64-bit integers, each key of an object once. Raises: MalformedJsonError."""
    raw = data.encode("utf-8", errors="surrogatepass") if isinstance(data, str) else bytes(data)
    if (problem := excess(raw, limits=limits)) is not None:
        raise MalformedJsonError(problem)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJsonError(f"must be UTF-8, but is not at byte {error.start}") from error
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            # Called for each number, so only where one may be too long; a hexadecimal digest can look like one.
            parse_int=_integer if _LONG_DIGITS.search(text) else None,
            parse_float=_number,
            parse_constant=_number,
        )
    except MalformedJsonError:
        raise
    except RecursionError as error:
        raise MalformedJsonError(_too_deep(limits)) from error
    except ValueError as error:
        raise MalformedJsonError(f"must be JSON, but is cut short or garbled: {error}") from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limits.max_depth):
        children = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise MalformedJsonError(_too_deep(limits))
    if "\\u" in text:
        # Half of a surrogate pair is no valid text: printing or storing it later would fail.
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = "must have texts of whole characters, but one holds half of a surrogate pair"
            raise MalformedJsonError(message) from error
    return value


def parse_record(data: bytes | bytearray | memoryview | str, kind: type[T], *, limits: JsonLimits = RECORD) -> T:
    """Parse `data` as `kind`: a dataclass, or any type built from dataclasses, whose fields must have exactly their types.

    Unknown keys are ignored. Constraints are `Annotated[int, msgspec.Meta(ge=0)]` or a `ValueError` in `__post_init__`.
    Raises: MalformedJsonError naming the place of the first wrong field.
    """
    return as_record(parse_json(data, limits=limits), kind)


def as_record(value: object, kind: type[T]) -> T:
    """As `parse_record`, for a value that is parsed already. Raises: MalformedJsonError."""
    if kind not in _known_kinds:
        with _KINDS_LOCK:
            msgspec.json.Decoder(kind)
            _known_kinds.add(kind)
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise MalformedJsonError(f"must be a valid record, but is not: {error}") from error


class JsonLines(Generic[T]):
    """Assembles records of one `kind` from the bytes of a stream that has one on each line."""

    def __init__(self, kind: type[T], *, limits: JsonLimits = RECORD, lenient: bool = False) -> None:
        """`lenient`: a line that is no such record, or too long, is left out."""
        self._kind = kind
        self._limits = limits
        self._lenient = lenient
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the records that are complete now. Raises: MalformedJsonError."""
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            try:
                yield parse_record(line, self._kind, limits=self._limits)
            except MalformedJsonError as error:
                if not self._lenient:
                    raise MalformedJsonError(f"a message {error}") from error
        if len(self._rest) > self._limits.max_bytes and self._lenient:
            # What is left of the line is no record either.
            self._rest.clear()
        elif len(self._rest) > self._limits.max_bytes:
            raise MalformedJsonError(f"a message has more than {self._limits.max_bytes} bytes")


def encode_record(value: object) -> bytes:
    """Compact JSON of dataclasses and values built from them. Raises: ValueError for a number that is not finite."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":"), allow_nan=False).encode()


def excess(raw: bytes, *, limits: JsonLimits) -> str | None:
    """Which limit a document exceeds, found without parsing it; None if it exceeds none."""
    if len(raw) > limits.max_bytes:
        return f"must have at most {limits.max_bytes} bytes, but has {len(raw)}"
    count = sum(raw.count(sign) for sign in (b"[", b"{", b",", b":"))
    if count > limits.max_values:
        return f"must have at most {limits.max_values} brackets, commas and colons, but has {count}"
    return None


def _plain(value: object) -> object:
    """msgspec refuses subclasses, such as torch's version, a str, or numpy's floats."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} cannot be JSON")


def _too_deep(limits: JsonLimits) -> str:
    return f"must have at most {limits.max_depth} nested objects and lists, but has more"


def _object(pairs: list[tuple[str, object]]) -> Mapping[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise MalformedJsonError(f"must have each key once, but has {twice[:80]!r} more than once")
    return value


def _integer(text: str) -> int:
    if len(text) > _INTEGER_DIGITS:
        raise MalformedJsonError(f"must have integers of at most {_INTEGER_DIGITS} digits, but has one of {len(text)}")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedJsonError(f"must have finite numbers, but has {text[:40]}")
    return value
