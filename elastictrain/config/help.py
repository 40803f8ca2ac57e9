"""What a command prints instead of training: the explanation of its keys, or its resolved configuration."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastictrain.config.command_line import read_command_line
from elastictrain.config.compose import compose, read_choices
from elastictrain.config.digest import to_yaml
from elastictrain.config.load import load
from elastictrain.config.schema import DATACLASSES, GROUPS, Key, keys_of
from elastictrain.config.task_signature import task_keys
from elastictrain.config.validate import suggest_choice
from elastictrain.errors import ConfigError, UsageError

Choices = Mapping[str, Mapping[str, Path]]

RUN = "python -m elastictrain.run"
_OPTIONS = {
    "recipe=NAME": "a whole run; everything else changes it",
    "GROUP=CHOICE": "another choice of one group, e.g. parallel=fsdp",
    "KEY=VALUE": "any key, e.g. train.steps=500; ~KEY takes the default of the program",
    "-- PROGRAM [ARGS]": "last: a Python file, or -m MODULE, with a loop of its own, in the place of a recipe",
    "--config-dir DIR": "a folder of your own with recipe/*.yaml, model/*.yaml ...; may be given several times",
    "--cfg job": "print the resolved configuration and end",
    "--dry-run [GPUS]": "print the memory that a GPU needs, what fits, and end (elastictrain.run only); GPUS: 80 for one of"
    " 80 GB, 8x80, or 2x8x80 for two hosts; without it those of this host",
    "--help [TOPIC]": "print this and end; TOPIC is a group or a key, e.g. --help train; with recipe=NAME also the keys of its"
    " task and model",
}

_TARGET = Key(
    "task._target_",
    "the dotted path of a class",
    None,
    "The task's class: any class with the methods build_model and loss. Other keys of `task` are its parameters.",
)
_MODEL = Key("model.*", "what the task declares; --help recipe=NAME lists it", "", "Fields of the task's parameter `model`.")


def requested_help(arguments: Sequence[str], *, program: str, purpose: str) -> str | None:
    """The text of `--help` or `--cfg job`; None without either. Raises: UsageError; ConfigError."""
    line = read_command_line(arguments)
    if line.action == "show":
        return to_yaml(load(arguments)).rstrip()
    if line.action == "dry_run" and program != RUN:
        raise UsageError(f"--dry-run must be given to `{RUN}`, but is given to `{program}`")
    if line.action in ("run", "dry_run"):
        return None
    choices = read_choices(line.config_dirs)
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    composed = compose(arguments) if line.overrides else None
    if composed is not None and composed.partial:
        raise ConfigError(composed.problems)
    task = composed.tree.get("task") if composed is not None else None
    target = task.get("_target_") if isinstance(task, dict) else None
    declared = task_keys(target) if isinstance(target, str) else []
    own = [key for group, cls in DATACLASSES.items() for key in keys_of(cls, path=group)]
    keys = (*own, _TARGET, *(declared or [_MODEL]))
    recipes = _choices(choices, "recipe", width)
    if line.topic == "recipe":
        return f"Recipes:\n{recipes}"
    if line.topic in GROUPS:
        explained = _explain_group(line.topic, keys=keys, width=width)
        return f"{explained}\n\nChoices of {line.topic}:\n{_choices(choices, line.topic, width)}"
    if line.topic:
        found = [_explain_key(key, width) for key in keys if key.path == line.topic]
        if not found:
            suggestion = suggest_choice(line.topic, choices=[*GROUPS, "recipe", *(key.path for key in keys)])
            raise UsageError(f"--help must be followed by a group or a key, but {line.topic} is none{suggestion}")
        return "\n".join(found)
    options = "\n".join(_row(option, text, width, indent=24) for option, text in _OPTIONS.items())
    usage = f"{purpose}\n\nUsage: {program} recipe=NAME [KEY=VALUE ...]\n\n{options}\n"
    names = (*GROUPS, *sorted(set(choices) - {*GROUPS, "recipe"}))
    groups = "\n".join(_row(name, ", ".join(sorted(choices.get(name, {}))) or "(none)", width) for name in names)
    explained = "\n\n".join(_explain_group(group, keys=keys, width=width) for group in GROUPS)
    return f"{usage}\nRecipes:\n{recipes}\n\nGroups and their choices:\n{groups}\n\nKeys:\n\n{explained}"


def _row(name: str, text: str, width: int, indent: int = 16) -> str:
    return textwrap.fill(text, width, initial_indent=f"  {name:<{indent - 2}}", subsequent_indent=" " * indent)


def _choices(choices: Choices, group: str, width: int) -> str:
    return "\n".join(_row(name, first_comment(file), width) for name, file in sorted(choices.get(group, {}).items()))


def first_comment(file: Path) -> str:
    """The first comment of a file that is not an instruction to Hydra."""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if line.startswith("#") and text and not text.startswith("@"):
            return text
    return ""


def _explain_group(group: str, *, keys: Sequence[Key], width: int) -> str:
    doc = " ".join((DATACLASSES[group].__doc__ or "").split()) if group in DATACLASSES else ""
    heading = textwrap.fill(f"{group}: {doc}" if doc else f"{group}:", width)
    return "\n".join([heading, *(_explain_key(key, width) for key in keys if key.path.startswith(f"{group}."))])


def _explain_key(key: Key, width: int) -> str:
    default = "must be given" if key.default is None else f"default {key.default}" if key.default else ""
    parts = "; ".join(part for part in (key.must_be, default) if part)
    first = textwrap.fill(f"  {key.path}  ({parts})", width, subsequent_indent="    ", break_long_words=False)
    doc = textwrap.fill(key.doc, width, initial_indent="      ", subsequent_indent="      ")
    return f"{first}\n{doc}" if doc else first
