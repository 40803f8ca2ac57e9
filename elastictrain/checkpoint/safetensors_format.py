"""The safetensors file format: 8 bytes of header length (little endian), a JSON header, the raw bytes of the tensors.

Source: the format section of the safetensors README. Free of torch.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from elastictrain.bounded_json import DOCUMENT, as_record, parse_json
from elastictrain.checkpoint.manifest import Count
from elastictrain.errors import InvalidCheckpointError

ALIGNMENT_BYTES = 8
LENGTH_BYTES = 8  # the header's length, at the start of a file
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class ElementType:
    name: str  # torch's, without `torch.`
    code: str  # in a safetensors header
    size_bytes: int


_TYPES_BY_BYTES = {  # the size of an element -> torch's names and the codes
    8: "float64=F64 int64=I64 uint64=U64 complex64=C64",
    4: "float32=F32 int32=I32 uint32=U32",
    2: "float16=F16 bfloat16=BF16 int16=I16 uint16=U16",
    1: (
        "float8_e4m3fn=F8_E4M3 float8_e4m3fnuz=F8_E4M3FNUZ float8_e5m2=F8_E5M2 float8_e5m2fnuz=F8_E5M2FNUZ "
        "float8_e8m0fnu=F8_E8M0 int8=I8 uint8=U8 bool=BOOL"
    ),
}
_PAIRS = [(size, *one.partition("=")) for size, pairs in _TYPES_BY_BYTES.items() for one in pairs.split()]
_TYPES = [ElementType(name, code, size) for size, name, _, code in _PAIRS]
BY_NAME = {element.name: element for element in _TYPES}
BY_CODE = {element.code: element for element in _TYPES}


class HeaderEntry(msgspec.Struct, frozen=True, rename={"code": "dtype", "span": "data_offsets"}):
    code: str
    shape: tuple[Count, ...]
    span: tuple[Count, Count]  # bytes [begin, end) after the header


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file of consecutive `tensors` (key, element type, shape); the data begins at a multiple of 8."""
    document: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for key, dtype, shape in tensors:
        end = begin + math.prod(shape) * BY_NAME[dtype].size_bytes
        document[key] = {"dtype": BY_NAME[dtype].code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def decode_header(head: bytes, *, where: str) -> dict[str, HeaderEntry]:
    """Tensors by key, in the order of their bytes; `head` has the whole header. Raises: InvalidCheckpointError."""
    if len(head) < LENGTH_BYTES:
        raise InvalidCheckpointError(f"{where}: a safetensors file must have at least 8 bytes, but this one has {len(head)}")
    (size_bytes,) = struct.unpack("<Q", head[:LENGTH_BYTES])
    there = len(head) - LENGTH_BYTES
    if size_bytes > min(MAX_HEADER_BYTES, there):
        raise InvalidCheckpointError(f"{where}: its header claims {size_bytes} bytes, but only {there} are there")
    try:
        document = parse_json(head[LENGTH_BYTES : LENGTH_BYTES + size_bytes], limits=DOCUMENT)
        if isinstance(document, dict):
            document.pop("__metadata__", None)
        stored = as_record(document, dict[str, HeaderEntry])
    except ValueError as error:
        raise InvalidCheckpointError(f"{where}: its safetensors header is garbled: {error}") from error
    if unknown := sorted({entry.code for entry in stored.values()} - BY_CODE.keys()):
        raise InvalidCheckpointError(f"{where}: its safetensors header has unknown element types {unknown}")
    return dict(sorted(stored.items(), key=lambda item: item[1].span))
