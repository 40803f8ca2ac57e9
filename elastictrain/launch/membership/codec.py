"""Records of membership as JSON, and back; what is not one reads as None."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from enum import StrEnum
from typing import TypeVar, get_type_hints

from elastictrain.bounded_json import parse_json
from elastictrain.launch.membership.records import End, Generation, GenerationFailure, GenerationMember, HostRecord

T = TypeVar("T", bound=HostRecord | End | Generation | GenerationMember | GenerationFailure)

_PARTS: Mapping[str, type[GenerationMember] | type[GenerationFailure]] = {
    "members": GenerationMember,
    "failures": GenerationFailure,
}
"""Fields that hold tuples of records."""

_LATER: Mapping[type, Mapping[str, object]] = {
    HostRecord: {"committed_step": 0, "hears": [], "writers": [], "end": None},
    Generation: {"owner": ""},
}
"""Fields that the records of earlier releases lack."""


def encode(record: HostRecord | Generation) -> bytes:
    """One object of JSON."""
    return json.dumps(asdict(record), sort_keys=True).encode()


def decode(cls: type[T], data: bytes) -> T | None:
    """The record in `data`, or None if that is none: torn, garbled, or of another release."""
    try:
        return _from_json(cls, parse_json(data))
    except (ValueError, OverflowError, RecursionError):
        return None


def _from_json(cls: type[T], value: object) -> T:
    """Raises: ValueError."""
    if isinstance(value, dict):
        value = {**_LATER.get(cls, {}), **value}
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(cls)}:
        raise ValueError(f"no {cls.__name__}")
    hints = get_type_hints(cls)
    make: Callable[..., T] = cls
    return make(**{name: _field(name, hints[name], one) for name, one in value.items()})


def _field(name: str, hint: object, value: object) -> object:
    if name in _PARTS and isinstance(value, list):
        return tuple(_from_json(_PARTS[name], one) for one in value)
    if hint == End | None:
        return None if value is None else _from_json(End, value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(hint, type) and hint is not float and type(value) is hint:
        return value
    raise ValueError(f"{name} cannot be {value!r}")
