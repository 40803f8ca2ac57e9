"""Parses a command line: its action, and the meaning of each override: a group's choice, a value, a deletion, or a mistake."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from elastictrain.config.constraints import show
from elastictrain.config.validate import suggest_choice
from elastictrain.errors import Problem, UsageError

OPTIONS = ("--config-dir", "--cfg", "--dry-run", "--help")
_MANY_RUNS = (
    "one command is one run, in a run.dir of its own; type a loop: "
    'for lr in 1e-3 3e-4; do COMMAND optim.lr="$lr" run.dir="runs/lr-$lr"; done'
)
_BY_RECIPE = "a run is chosen by recipe=NAME, and folders of your own come by --config-dir DIR"
_RESOLVED = "--cfg job shows the resolved configuration"
_HYDRA_OPTIONS = {
    **dict.fromkeys(("--multirun", "-m"), _MANY_RUNS),
    "--experimental-rerun": "the same command continues a run, and config.yaml in its folder is a recipe",
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp", "-cd"), _BY_RECIPE),
    **dict.fromkeys(("--info", "-i", "--resolve", "--package", "-p", "-c", "--hydra-help"), _RESOLVED),
}

_KEY = re.compile(r"[~+]*[A-Za-z_]\w*(?:[./][A-Za-z_]\w*)*", re.ASCII)
_LONGEST_SHOWN = 200
_EXPLAINED = " (--help explains the command line)"


@dataclass(frozen=True, slots=True)
class CommandLine:
    overrides: tuple[str, ...]  # `recipe=X`, `group=choice`, `key=value`, `+key=value`, `++key=value`, `~key`, unread
    config_dirs: tuple[str, ...]  # the user's folders with recipes, models and so on
    # train; or print the keys (`--help`), the configuration (`--cfg job`), or the memory that it needs (`--dry-run`)
    action: Literal["run", "help", "show", "dry_run"]
    topic: str  # of `--help TOPIC`: a group or key, "" for all; of `--dry-run GPUS`: which ones, "" for this host's


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Raises: UsageError that names every option that is unknown or lacks its value."""
    overrides: list[str] = []
    config_dirs: list[str] = []
    action: Literal["run", "help", "show", "dry_run"] = "run"
    topic = ""
    wrong: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            overrides.append(argument)
        elif option in ("--help", "-h", "--dry-run"):
            action = "dry_run" if option == "--dry-run" else "help"
            if rest and "=" not in rest[0] and not rest[0].startswith(("-", "~")):
                topic = rest.pop(0)
        elif option in _HYDRA_OPTIONS:
            wrong.append(f"{option} is not offered: {_HYDRA_OPTIONS[option]}")
        elif option not in OPTIONS:
            as_key = f": keys are given without dashes, {argument.lstrip('-')}"
            wrong.append(f"unknown option {argument}{as_key if equals else suggest_choice(option, choices=OPTIONS)}")
        elif not equals and (not rest or rest[0].startswith("--")):
            wrong.append(f"{option} needs a value: {option} {'DIR' if option == '--config-dir' else 'job'}")
        else:
            value = value if equals else rest.pop(0)
            if option == "--config-dir":
                config_dirs.append(value)
            elif value != "job":
                wrong.append(f"--cfg must be job, but is {value}")
            elif action == "run":
                action = "show"
    if wrong:
        raise UsageError("; ".join(wrong) + _EXPLAINED)
    return CommandLine(tuple(overrides), tuple(config_dirs), action, topic)


def parse_overrides(
    texts: Sequence[str], *, known: Mapping[str, Collection[str]]
) -> tuple[dict[str, str | None], list[Override], list[Problem]]:
    """The choice of each group (None leaves it out), one override for each key, and unknown choices. `known`: group -> its
    choices. Raises: UsageError with every argument that is no KEY=VALUE, or contradicts another."""
    parser = OverridesParser.create()
    choices: dict[str, str | None] = {}
    values: list[Override] = []
    problems: list[Problem] = []
    misuses: list[str] = []
    given: dict[str, str] = {}
    for text in texts:
        try:
            override = parser.parse_override(text)
            misuse = _misuse(override, text)
        # Python itself refuses a number of thousands of digits, and brackets within thousands of brackets.
        except (HydraException, ValueError, RecursionError) as error:
            shortened = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
            misuses.append(_unreadable(shortened, error, recipes=known["recipe"]))
            continue
        key = override.key_or_group
        if not misuse and key in given:
            misuse = f"`{key}` must be given once, but is given twice: {given[key]} and {text}"
        given.setdefault(key, text)
        if misuse:
            misuses.append(misuse)
        elif key not in known:
            values.append(override)
        else:
            choice = None if override.is_delete() or override.value() in (None, "null") else override.value()
            name = None if choice is None else str(choice).removesuffix(".yaml")
            if name is None or name in known[key]:
                choices[key] = name
                continue
            suggestion = suggest_choice(name, choices=list(known[key]))
            message = f"must be one of {', '.join(sorted(known[key]))}, but is {show(choice)}{suggestion}"
            problems.append(Problem(key, message))
    if misuses:
        raise UsageError("; ".join(misuses) + _EXPLAINED)
    return choices, values, problems


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


def _misuse(override: Override, text: str) -> str:
    """Why an override that Hydra understands is refused; empty if it is not."""
    key = override.key_or_group
    if not key:
        return f"`{text}` must be KEY=VALUE"
    if override.is_sweep_override():
        return (
            f"`{key}` must be one value, but {text} gives several: {_MANY_RUNS}; a list is written [a,b], text with a"
            " comma in quotes"
        )
    if override.package is not None:
        return f"`{text}` must be KEY=VALUE; @PACKAGE is not offered"
    if re.split("[./]", key)[0] == "hydra":
        return f"`{key}` is not a key: Hydra only composes here; folders of your own come by --config-dir DIR"
    if "/" in key:
        return f"`{key}` is not a group; a choice in a folder is written model=folder/name"
    return ""
