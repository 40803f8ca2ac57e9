"""Decides whether plain values are what a dataclass declares; all problems are collected, none is raised."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elastictrain.config.constraints import NonEmpty, Range
from elastictrain.config.describe import describe, show
from elastictrain.config.suggest import suggest_key
from elastictrain.errors import ConfigError, Problem

NOT_GIVEN = "???"
"""How YAML writes a key that must be given."""

_LARGEST = 2**63 - 1
"""Tensors and files count in 64 bits."""

T = TypeVar("T")
Checked = tuple[object, list[Problem]]


def check_dataclass(
    cls: type[T], *, values: Mapping[str, object], path: str, vocabulary: Sequence[str] = ()
) -> tuple[T | None, list[Problem]]:
    """An instance of `cls` (or None), and everything that is wrong with `values`.

    `path` is the dotted key of the group; `vocabulary` are all dotted keys there are, for suggestions.
    """
    if not is_dataclass(cls):
        raise TypeError(f"{cls} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    known = [field for field in fields(cls) if field.init]
    names = [field.name for field in known]
    words = [*(f"{path}.{name}" for name in names), *vocabulary]
    problems = [unknown_key(f"{path}.{key}", vocabulary=words) for key in values if key not in names]
    arguments: dict[str, object] = {}
    for field in known:
        key = f"{path}.{field.name}"
        if values.get(field.name, NOT_GIVEN) == NOT_GIVEN:
            if _required(field) or field.name in values:
                problems.append(missing_key(key, hint=hints[field.name]))
            continue
        arguments[field.name], found = check_value(values[field.name], hint=hints[field.name], path=key)
        problems += found
    if problems:
        return None, problems
    return construct(cls, arguments=arguments, path=path)


def construct(cls: type[T], *, arguments: Mapping[str, object], path: str) -> tuple[T | None, list[Problem]]:
    """Call `cls`; what its own checks refuse (`ConfigError`, `ValueError`) becomes problems under `path`."""
    try:
        return cls(**arguments), []
    except ConfigError as error:
        if not error.problems:
            return None, [Problem(path, str(error))]
        return None, [_under(path, problem) for problem in error.problems]
    except ValueError as error:
        return None, [Problem(path, f"is refused by {cls.__qualname__}: {error}")]


def _under(path: str, problem: Problem) -> Problem:
    """A class knows its fields' names but not where the config puts them."""
    if problem.key == path or problem.key.startswith(f"{path}."):
        return problem
    return Problem(f"{path}.{problem.key}", problem.message)


def unknown_key(key: str, *, vocabulary: Sequence[str]) -> Problem:
    """The problem of a key that nothing reads."""
    if meant := suggest_key(key, vocabulary=vocabulary):
        return Problem(key, f"is not a key; did you mean `{meant}`?")
    group = key.rpartition(".")[0]
    siblings = dict.fromkeys(word.rpartition(".")[2] for word in vocabulary if group and word.rpartition(".")[0] == group)
    return Problem(key, f"is not a key; `{group}` has {', '.join(siblings)}" if siblings else "is not a key; --help lists all")


def missing_key(key: str, *, hint: object) -> Problem:
    """The problem of a mandatory key without a value."""
    return Problem(key, f"must be given: {describe(hint)}")


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def check_value(value: object, *, hint: object, path: str) -> Checked:
    """`value` converted to the type `hint`, and what is wrong with it.

    Conversions lose nothing: 1 is a float, 1e3 is a whole number, a list is a tuple. Text is never a number, and true is not 1.
    """
    base, constraints = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    members = get_args(base) if get_origin(base) in (Union, UnionType) else (base,)
    attempts = []
    for member in sorted(members, key=lambda one: one is not type(value)):
        inner = get_origin(member) is Annotated
        converted, problems = check_value(value, hint=member, path=path) if inner else _check_member(value, member, path)
        if not problems and all(_holds(constraint, converted) for constraint in constraints):
            return converted, []
        attempts.append((member, problems))
    candidates = [(member, problems) for member, problems in attempts if member is not NoneType]
    if len(candidates) == 1 and _is_container(candidates[0][0]) and candidates[0][1] and _looks_like(value, candidates[0][0]):
        return value, candidates[0][1]
    return value, [Problem(path, f"must be {describe(hint)}, but is {show(value)}{_yaml_trap(value, members)}")]


def _yaml_trap(value: object, members: tuple[object, ...]) -> str:
    """YAML reads a bare 007 as a number, and the bare words on, off, yes and no as true and false."""
    words = [word for member in members for word in get_args(member) if word in ("on", "off", "yes", "no")]
    if isinstance(value, bool) and words:
        return f'; YAML reads a bare {words[0]} as {show(value)}, write "{words[0]}" in quotes'
    if isinstance(value, bool | int | float) and str in members:
        return f"; text that looks like this needs quotes within quotes, '\"{show(value)}\"'"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"; the largest whole number is {_LARGEST}"
    return ""


def _holds(constraint: object, value: object) -> bool:
    match constraint:
        case Range(minimum=minimum, maximum=maximum, exclusive=exclusive) if isinstance(value, int | float):
            above = minimum is None or (value > minimum if exclusive else value >= minimum)
            return above and (maximum is None or value <= maximum)
        case NonEmpty() if isinstance(value, str):
            return bool(value.strip())
    return True


def _is_container(hint: object) -> bool:
    return (isinstance(hint, type) and is_dataclass(hint)) or get_origin(hint) in (tuple, list, Sequence, dict, Mapping)


def _looks_like(value: object, hint: object) -> bool:
    """Whether what is wrong is inside `value`, and not `value` itself."""
    if get_origin(hint) in (tuple, list, Sequence):
        arguments = get_args(hint)
        fixed = get_origin(hint) is tuple and Ellipsis not in arguments
        return isinstance(value, list | tuple) and not (fixed and len(value) != len(arguments))
    return isinstance(value, Mapping)


def _check_member(value: object, hint: object, path: str) -> Checked:
    """Like `check_value`, for a type that is neither a union nor annotated."""
    wrong = [Problem(path, f"must be {describe(hint)}, but is {show(value)}")]
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return value, []
    if origin is Literal:
        same = [one for one in arguments if one == value and type(one) is type(value)]
        return (same[0], []) if same else (value, wrong)
    if isinstance(hint, type) and is_dataclass(hint):
        return check_dataclass(hint, values=value, path=path) if isinstance(value, Mapping) else (value, wrong)
    if _is_container(hint):
        return _check_items(value, hint, path) if _looks_like(value, hint) else (value, wrong)
    if origin is not None or not isinstance(hint, type):
        return value, [Problem(path, f"cannot come from config: its type is {hint}")]
    return _check_scalar(value, hint, wrong)


def _check_scalar(value: object, hint: type, wrong: list[Problem]) -> Checked:
    if isinstance(value, bool):
        return value, ([] if hint is bool else wrong)
    if hint is float and isinstance(value, int | float):
        return float(value), ([] if math.isfinite(value) else wrong)
    if hint is int and isinstance(value, float):
        return (int(value), []) if value.is_integer() and abs(value) <= _LARGEST else (value, wrong)
    if hint is int and isinstance(value, int) and abs(value) > _LARGEST:
        return value, wrong
    return value, ([] if isinstance(value, hint) else wrong)


def _check_items(value: object, hint: object, path: str) -> Checked:
    """Lists, tuples and mappings."""
    origin, arguments = get_origin(hint), get_args(hint)
    problems: list[Problem] = []
    if isinstance(value, Mapping):
        mapping: dict[object, object] = {}
        for key, item in value.items():
            mapping[key], found = check_value(item, hint=arguments[1], path=f"{path}.{key}")
            problems += found
        return mapping, problems
    items = list(value) if isinstance(value, list | tuple) else []
    hints = arguments if origin is tuple and Ellipsis not in arguments else (arguments[0],) * len(items)
    converted = []
    for index, (item, one) in enumerate(zip(items, hints, strict=True)):
        result, found = check_value(item, hint=one, path=f"{path}[{index}]")
        converted.append(result)
        problems += found
    return (tuple(converted) if origin is tuple else converted), problems
