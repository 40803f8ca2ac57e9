"""Checks plain values against the fields of a dataclass; collects all problems, and raises none."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elastictrain.config.constraints import NonEmpty, Range, describe, show
from elastictrain.errors import ConfigError, Problem

NOT_GIVEN = "???"  # how YAML writes a key that must be given
_LARGEST = 2**63 - 1  # tensors and files count in 64 bits
T = TypeVar("T")
Checked = tuple[object, list[Problem]]


def parameters_of(cls: type) -> dict[str, tuple[object, inspect.Parameter]]:
    """The type and the parameter of each key of `cls`. Raises: NameError for an unreadable annotation."""
    # `getattr_static` finds an inherited constructor, too.
    constructor: object = inspect.getattr_static(cls, "__init__")
    hints = get_type_hints(constructor, include_extras=True)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(cls).parameters
    return {name: (hints.get(name, object), one) for name, one in parameters.items() if one.kind in by_name}


def check_dataclass(
    cls: type[T], *, values: Mapping[str, object], path: str, vocabulary: Sequence[str] = ()
) -> tuple[T | None, list[Problem]]:
    """An instance of `cls` (or None), and all problems of `values`. Arguments as for `check_keys`."""
    arguments, problems = check_keys(parameters_of(cls), values=values, path=path, vocabulary=vocabulary)
    return (None, problems) if problems else construct(cls, arguments=arguments, path=path)


def check_keys(
    declared: Mapping[str, tuple[object, inspect.Parameter]],
    *,
    values: Mapping[str, object],
    path: str,
    vocabulary: Sequence[str] = (),
) -> tuple[dict[str, object], list[Problem]]:
    """Valid values of the given keys, and all problems; `vocabulary`: all dotted keys, for suggestions."""
    words = [*(f"{path}.{name}" for name in declared), *vocabulary]
    problems = [unknown_key(f"{path}.{name}", vocabulary=words) for name in values if name not in declared]
    arguments: dict[str, object] = {}
    for name, (hint, parameter) in declared.items():
        key = f"{path}.{name}"
        if values.get(name, NOT_GIVEN) != NOT_GIVEN:
            arguments[name], found = check_value(values[name], hint=hint, path=key)
            problems += found
        elif parameter.default is inspect.Parameter.empty or name in values:
            what = "the constructor has no default for it" if hint in (Any, object) else describe(hint)
            problems.append(Problem(key, f"must be given: {what}"))
    return arguments, problems


def construct(cls: type[T], *, arguments: Mapping[str, object], path: str) -> tuple[T | None, list[Problem]]:
    """Call `cls`; its own `ConfigError` or `ValueError` becomes problems under `path`."""
    try:
        return cls(**arguments), []
    except ConfigError as error:
        if not error.problems:
            return None, [Problem(path, str(error))]
        # A class knows its fields' names but not where the config puts them.
        keys = [one.key if f"{one.key}.".startswith(f"{path}.") else f"{path}.{one.key}" for one in error.problems]
        return None, [Problem(key, one.message) for key, one in zip(keys, error.problems, strict=True)]
    except ValueError as error:
        return None, [Problem(path, f"is refused by {cls.__qualname__}: {error}")]


def unknown_key(key: str, *, vocabulary: Sequence[str]) -> Problem:
    if meant := suggest_key(key, vocabulary=vocabulary):
        return Problem(key, f"is not a key; did you mean `{meant}`?")
    group = key.rpartition(".")[0]
    siblings = dict.fromkeys(word.rpartition(".")[2] for word in vocabulary if group and word.rpartition(".")[0] == group)
    return Problem(key, f"is not a key; `{group}` has {', '.join(siblings)}" if siblings else "is not a key; --help lists all")


def suggest_choice(wrong: str, *, choices: Sequence[str]) -> str:
    """A "did you mean" to append to a message, or nothing."""
    close = get_close_matches(wrong, choices, n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


def suggest_key(wrong: str, *, vocabulary: Sequence[str]) -> str:
    """The dotted key probably meant by `wrong`, or ""; within an existing group, only one of its own."""
    group, _, leaf = wrong.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in vocabulary if group and key.rpartition(".")[0] == group]
    if siblings:
        close = get_close_matches(leaf, siblings, n=1, cutoff=0.6)
        return f"{group}.{close[0]}" if close else ""
    elsewhere = {key for key in vocabulary if not group and key.rpartition(".")[2] == leaf}
    close = [*elsewhere] if len(elsewhere) == 1 else get_close_matches(wrong.lower(), vocabulary, n=1, cutoff=0.85)
    return close[0] if close else ""


def check_value(value: object, *, hint: object, path: str) -> Checked:
    """`value` converted to `hint` without loss (1 is a float, 1e3 a whole number, text is no number), and its problems."""
    checked = _convert(value, hint, path)
    if checked is not None:
        return checked
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    members = get_args(base) if get_origin(base) in (Union, UnionType) else (base,)
    return value, [Problem(path, f"must be {describe(hint)}, but is {show(value)}{_yaml_trap(value, members)}")]


def _yaml_trap(value: object, members: tuple[object, ...]) -> str:
    """A hint where YAML reads a bare 007 as a number, or the bare words on, off, yes and no as true and false."""
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


def _convert(value: object, hint: object, path: str) -> Checked | None:
    """Like `check_value`, with the problems inside `value`; None if `value` itself is not of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        checked = _convert(value, arguments[0], path)
        held = checked is not None and (checked[1] or all(_holds(one, checked[0]) for one in arguments[1:]))
        return checked if held else None
    if origin in (Union, UnionType):
        members = sorted(arguments, key=lambda one: one is not type(value))
        fitting = [checked for one in members if (checked := _convert(value, one, path)) is not None]
        good = [checked for checked in fitting if not checked[1]]
        return next(iter(good or fitting), None)
    if hint is Any or hint is object:
        return value, []
    if origin is Literal:
        same = [one for one in arguments if one == value and type(one) is type(value)]
        return (same[0], []) if same else None
    if isinstance(hint, type) and is_dataclass(hint):
        return check_dataclass(hint, values=value, path=path) if isinstance(value, Mapping) else None
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return None
        items = {key: check_value(item, hint=arguments[1], path=f"{path}.{key}") for key, item in value.items()}
        return {key: item for key, (item, _) in items.items()}, [problem for _, found in items.values() for problem in found]
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return None
        hints = arguments if origin is tuple and Ellipsis not in arguments else arguments[:1] * len(value)
        if len(hints) != len(value):
            return None
        places = enumerate(zip(value, hints, strict=True))
        checked_items = [check_value(item, hint=one, path=f"{path}[{index}]") for index, (item, one) in places]
        converted = [item for item, _ in checked_items]
        problems = [problem for _, found in checked_items for problem in found]
        return tuple(converted) if origin is tuple else converted, problems
    if origin is not None or not isinstance(hint, type):
        return value, [Problem(path, f"cannot come from config: its type is {hint}")]
    return _convert_scalar(value, hint)


def _convert_scalar(value: object, hint: type) -> Checked | None:
    if isinstance(value, bool):
        return (value, []) if hint is bool else None
    if hint is float and isinstance(value, int | float):
        return (float(value), []) if math.isfinite(value) else None
    if hint is int and isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return (int(value), []) if whole and abs(value) <= _LARGEST else None
    return (value, []) if isinstance(value, hint) else None
