"""Decides what each override of a command line means: a group's choice, a value, a deletion, or a mistake."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from elastictrain.config.conf_folders import ConfFolders
from elastictrain.config.describe import show
from elastictrain.config.suggest import suggest_choice
from elastictrain.errors import Problem


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
    """Group -> choice; None leaves the group out. The last word counts."""

    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...]

    partial: bool
    """Whether a choice could not be taken: keys that are missing then mean nothing."""


def plan_overrides(overrides: Sequence[str], *, folders: ConfFolders) -> Plan:
    """Sort every override; mistakes are collected."""
    parser = OverridesParser.create()
    choices: dict[str, str | None] = {}
    assignments: list[Assignment] = []
    problems: list[Problem] = []
    partial = False
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            problems.append(Problem(text, _unreadable(text, error, recipes=folders.choices["recipe"])))
            continue
        key = override.key_or_group
        if problem := _refuse(override, text):
            problems.append(problem)
        elif key in folders.choices:
            choice, problem = _choose(override, folders.choices[key])
            if problem:
                problems.append(problem)
                partial = True
            else:
                choices[key] = choice
        else:
            assignments.append(Assignment(key, override.value(), override.is_delete()))
    return Plan(choices, tuple(assignments), tuple(problems), partial)


def _unreadable(text: str, error: HydraException, *, recipes: Collection[str]) -> str:
    if text in recipes:
        return f"must be KEY=VALUE; did you mean recipe={text}?"
    if "=" not in text:
        return "must be KEY=VALUE"
    key, _, value = text.partition("=")
    reason = str(error).partition(" expecting ")[0].splitlines()[0]
    return f"cannot be read ({reason}); if the value is text, write it in quotes: '{key}=\"{value}\"'"


def _refuse(override: Override, text: str) -> Problem | None:
    """What Hydra would understand and we do not offer."""
    key = override.key_or_group
    if not key:
        return Problem(text, "must be KEY=VALUE")
    if override.is_sweep_override():
        return Problem(
            key, f"must be one value, but {text} gives several; a list is written [a,b], text with a comma in quotes"
        )
    if override.package is not None:
        return Problem(text, "must be KEY=VALUE; @PACKAGE is not offered")
    if key == "hydra" or key.startswith("hydra."):
        return Problem(key, "is not a key: Hydra only composes here; folders of your own come by --config-dir DIR")
    if "/" in key:
        return Problem(key, "is not a group; a choice in a folder is written model=folder/name")
    return None


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
