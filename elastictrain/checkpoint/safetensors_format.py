"""The safetensors file format: 8 bytes of header length (little endian), a JSON header, the raw bytes of the tensors.

Source: the format section of the safetensors README.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.checkpoint.dtypes import BY_CODE
from elastictrain.errors import InvalidCheckpointError

ALIGNMENT_BYTES = 8
LENGTH_BYTES = 8
"""Before the header: its length."""

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file: its bytes are [begin, end), counted from the end of the header."""

    key: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(entries: Sequence[HeaderEntry], *, metadata: Mapping[str, str]) -> bytes:
    """Length and header, padded with spaces so that the data begins at a multiple of 8."""
    document: dict[str, object] = {"__metadata__": dict(metadata)}
    for entry in entries:
        document[entry.key] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def decode_header(head: bytes, *, where: str) -> tuple[HeaderEntry, ...]:
    """The tensors of a file, from its first bytes (all of the header, at least).

    Raises: InvalidCheckpointError, naming `where`, if they are not a safetensors header.
    """
    if len(head) < 8:
        raise InvalidCheckpointError(f"{where}: a safetensors file must have at least 8 bytes, but this one has {len(head)}")
    (size_bytes,) = struct.unpack("<Q", head[:8])
    if size_bytes > min(MAX_HEADER_BYTES, len(head) - 8):
        raise InvalidCheckpointError(f"{where}: its header claims {size_bytes} bytes, but only {len(head) - 8} are there")
    try:
        document = parse_json(head[8 : 8 + size_bytes], limits=DOCUMENT)
        entries = [_entry(key, value) for key, value in document.items() if key != "__metadata__"]
        unknown = [entry.code for entry in entries if entry.code not in BY_CODE]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidCheckpointError(f"{where}: its safetensors header is garbled ({type(error).__name__}: {error})") from error
    if unknown:
        raise InvalidCheckpointError(f"{where}: its safetensors header has unknown element types {sorted(set(unknown))}")
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))


def _entry(key: str, value: Mapping[str, object]) -> HeaderEntry:
    begin, end = _counts(value["data_offsets"], key)
    return HeaderEntry(key, str(value["dtype"]), _counts(value["shape"], key), begin, end)


def _counts(value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise TypeError(f"{key!r}: must have a list of whole numbers >= 0, but has {value!r:.80}")
    return tuple(value)
