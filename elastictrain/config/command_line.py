"""Reads a command line into what is asked for; decides nothing about the keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastictrain.config.suggest import suggest_choice
from elastictrain.errors import UsageError

OPTIONS = ("--config-dir", "--cfg", "--help")
_ONE_RUN = "one command is one run, with one value for each key"
_BY_RECIPE = "a run is chosen by recipe=NAME, and folders of your own come by --config-dir DIR"
_RESOLVED = "--cfg job shows the resolved configuration"
_HYDRA_OPTIONS = {
    **dict.fromkeys(("--multirun", "-m", "--experimental-rerun"), _ONE_RUN),
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp", "-cd"), _BY_RECIPE),
    **dict.fromkeys(("--info", "-i", "--resolve", "--package", "-p", "-c", "--hydra-help"), _RESOLVED),
}
"""Options of Hydra's own command line, and what there is instead."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a person typed, taken apart."""

    overrides: tuple[str, ...]
    """`recipe=X`, `group=choice`, `key=value`, `+key=value`, `++key=value`, `~key`, unread."""

    config_dirs: tuple[str, ...]
    """Folders of the person's own with recipes, models and so on."""

    action: Literal["run", "help", "show"]
    """Train; or only explain the keys (`--help`); or only show the resolved configuration (`--cfg job`)."""

    topic: str
    """Of `--help TOPIC`: a group or key, "" for all."""


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Raises: UsageError, which names every option that is unknown or lacks its value."""
    overrides: list[str] = []
    config_dirs: list[str] = []
    action: Literal["run", "help", "show"] = "run"
    topic = ""
    wrong: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        option, equals, value = argument.partition("=")
        if option in ("--help", "-h"):
            action = "help"
            if rest and "=" not in rest[0] and not rest[0].startswith(("-", "~")):
                topic = rest.pop(0)
            continue
        if option not in OPTIONS:
            wrong.append(_unknown(argument))
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            wrong.append(f"{option} needs a value: {option} {'DIR' if option == '--config-dir' else 'job'}")
            continue
        value = value if equals else rest.pop(0)
        if option == "--config-dir":
            config_dirs.append(value)
        elif value != "job":
            wrong.append(f"--cfg must be job, but is {value}")
        else:
            action = "show" if action == "run" else action
    if wrong:
        raise usage_error(wrong)
    return CommandLine(tuple(overrides), tuple(config_dirs), action, topic)


def usage_error(wrong: Sequence[str]) -> UsageError:
    """All that is wrong with a command line in one error."""
    return UsageError("; ".join(wrong) + " (--help explains the command line)")


def _unknown(argument: str) -> str:
    option, equals, _ = argument.partition("=")
    if option in _HYDRA_OPTIONS:
        return f"{option} is not offered: {_HYDRA_OPTIONS[option]}"
    if equals:
        return f"unknown option {argument}: keys are given without dashes, {argument.lstrip('-')}"
    return f"unknown option {option}{suggest_choice(option, choices=OPTIONS)}"
