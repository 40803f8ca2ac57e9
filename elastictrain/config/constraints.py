"""Constraints on a config field's value beyond its type, and their wording in error messages and `--help`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Range:
    """A number within [minimum, maximum], or (minimum, maximum] if `exclusive`; None leaves an end open."""

    minimum: float | None = None
    maximum: float | None = None
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class NonEmpty:
    """A text with at least one character that is not white space."""


_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null", object: "anything"}


def describe(hint: object) -> str:
    """The required type of a value, to follow "must be"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([describe(arguments[0]), *(_constraint(one) for one in arguments[1:])]).strip()
    if origin is Literal:
        return "one of " + ", ".join(show(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(describe(member) for member in arguments)
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (Ellipsis,)):
        return f"a list, each {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: " + ", ".join(describe(one) for one in arguments)
    if origin in (dict, Mapping) or (isinstance(hint, type) and (hint in (dict, Mapping) or is_dataclass(hint))):
        return "a group of keys"
    if hint is Any:
        return "anything"
    if isinstance(hint, type):
        return _PLAIN.get(hint, f"a {hint.__qualname__}")
    return str(hint)


def _constraint(constraint: object) -> str:
    match constraint:
        case Range(minimum=minimum, maximum=maximum, exclusive=exclusive):
            ends = [] if minimum is None else [f"{'>' if exclusive else '>='} {show_number(minimum)}"]
            return " and ".join(ends if maximum is None else [*ends, f"<= {show_number(maximum)}"])
        case NonEmpty():
            return "that is not empty"
    return ""


def show_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def show(value: object) -> str:
    """A value as a user would write it in YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(one) for one in value) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def flatten(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """The keys of groups of keys, with dots, and their values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def plain(value: object) -> object:
    """A value in YAML's types: dataclasses become groups of keys, tuples become lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
