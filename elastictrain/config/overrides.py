"""Decides what each override of a command line means: a group's choice, a value, a deletion, or a mistake."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from elastictrain.config.conf_folders import ConfFolders
from elastictrain.config.describe import show
from elastictrain.config.suggest import suggest_choice
from elastictrain.errors import Problem

_KEY = re.compile(r"[~+]*[A-Za-z_]\w*(?:[./][A-Za-z_]\w*)*", re.ASCII)

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Assignment:
    """One key that is given a value, or taken away."""

    key: str
    value: object
    deletes: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What the overrides ask for, in their order."""

    choices: Mapping[str, str | None]
    """Group -> choice; None leaves the group out."""

    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...]
    """Choices that there are not."""

    misuses: tuple[str, ...]
    """Arguments that are no KEY=VALUE, or contradict another."""

    partial: bool
    """Whether a choice could not be taken: keys that are missing then mean nothing."""


def plan_overrides(overrides: Sequence[str], *, folders: ConfFolders) -> Plan:
    """Sort every override; mistakes are collected."""
    parser = OverridesParser.create()
    choices: dict[str, str | None] = {}
    assignments: list[Assignment] = []
    problems: list[Problem] = []
    misuses: list[str] = []
    given: dict[str, str] = {}
    partial = False
    for text in overrides:
        try:
            override = parser.parse_override(text)
            misuse = _misuse(override, text)
        # Python itself refuses a number of thousands of digits, and brackets within thousands of brackets.
        except (HydraException, ValueError, RecursionError) as error:
            misuses.append(_unreadable(_shortened(text), error, recipes=folders.choices["recipe"]))
            continue
        key = override.key_or_group
        if not misuse and key in given:
            misuse = f"`{key}` must be given once, but is given twice: {given[key]} and {text}"
        given.setdefault(key, text)
        if misuse:
            misuses.append(misuse)
        elif key in folders.choices:
            choice, problem = _choose(override, folders.choices[key])
            if problem:
                problems.append(problem)
                partial = True
            else:
                choices[key] = choice
        else:
            assignments.append(Assignment(key, override.value(), override.is_delete()))
    return Plan(choices, tuple(assignments), tuple(problems), tuple(misuses), partial)


def _unreadable(text: str, error: Exception, *, recipes: Collection[str]) -> str:
    if text in recipes:
        return f"`{text}` must be KEY=VALUE; did you mean recipe={text}?"
    key, equals, value = text.partition("=")
    if not equals or not key:
        return f"`{text}` must be KEY=VALUE"
    if not _KEY.fullmatch(key):
        return f"`{text}` must be KEY=VALUE, where KEY is words joined by dots, but is {show(key)}"
    reason = str(error).partition(" expecting ")[0].splitlines()[0]
    return f"`{text}` cannot be read ({reason}); if the value is text, write it in quotes: '{key}=\"{value}\"'"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _misuse(override: Override, text: str) -> str:
    """What Hydra would understand and we do not offer; empty if there is nothing of it."""
    key = override.key_or_group
    if not key:
        return f"`{text}` must be KEY=VALUE"
    if override.is_sweep_override():
        return (
            f"`{key}` must be one value, but {text} gives several, and sweeps are not offered; a list is written [a,b], text"
            " with a comma in quotes"
        )
    if override.package is not None:
        return f"`{text}` must be KEY=VALUE; @PACKAGE is not offered"
    if re.split("[./]", key)[0] == "hydra":
        return f"`{key}` is not a key: Hydra only composes here; folders of your own come by --config-dir DIR"
    if "/" in key:
        return f"`{key}` is not a group; a choice in a folder is written model=folder/name"
    return ""


def _choose(override: Override, known: Mapping[str, object]) -> tuple[str | None, Problem | None]:
    if override.is_delete():
        return None, None
    value = override.value()
    if value is None or value == "null":
        return None, None
    name = str(value).removesuffix(".yaml")
    if name in known:
        return name, None
    message = f"must be one of {', '.join(sorted(known))}, but is {show(value)}{suggest_choice(name, choices=list(known))}"
    return None, Problem(override.key_or_group, message)
