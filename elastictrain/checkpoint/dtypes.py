"""Element types: torch's name, the safetensors code, bytes per element. Free of torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """How one element type is named and how wide it is."""

    name: str
    """As torch prints it, without `torch.`."""

    code: str
    """As a safetensors header spells it."""

    size_bytes: int


_TABLE = (
    ("float64", "F64", 8),
    ("float32", "F32", 4),
    ("float16", "F16", 2),
    ("bfloat16", "BF16", 2),
    ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    ("float8_e5m2", "F8_E5M2", 1),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    ("float8_e8m0fnu", "F8_E8M0", 1),
    ("int64", "I64", 8),
    ("int32", "I32", 4),
    ("int16", "I16", 2),
    ("int8", "I8", 1),
    ("uint64", "U64", 8),
    ("uint32", "U32", 4),
    ("uint16", "U16", 2),
    ("uint8", "U8", 1),
    ("bool", "BOOL", 1),
    ("complex64", "C64", 8),
)

BY_NAME = {name: ElementType(name, code, size_bytes) for name, code, size_bytes in _TABLE}
BY_CODE = {element.code: element for element in BY_NAME.values()}
