"""Turns arguments into one plain mapping through Hydra's compose API; values are not judged here.

Hydra composes the groups only. Values are laid over its result one by one, so that every key that does not fit is reported, not
just the first. Nothing is written, and neither the working directory nor logging is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]

from elastictrain.config.command_line import read_command_line, usage_error
from elastictrain.config.conf_folders import ConfFolders, read_conf_folders
from elastictrain.config.overrides import Assignment, Plan, plan_overrides
from elastictrain.config.validate import NOT_GIVEN
from elastictrain.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Composed:
    """What conf/ and the command line say together, not yet checked."""

    tree: dict[str, object]
    """Group -> key -> plain value; "???" where a value must be given and is not. Interpolations are resolved."""

    problems: tuple[Problem, ...]
    """What could not be read or resolved; to be reported together with what the values are found guilty of."""

    partial: bool
    """Whether a group's choice could not be taken: keys that are missing then mean nothing."""

    recipes: tuple[str, ...]
    """Recipes to choose from."""

    recipe: str | None
    """The recipe that was chosen."""


def compose(arguments: Sequence[str]) -> Composed:
    """Compose a run from `recipe=`, groups' choices, values and `--config-dir`.

    Raises: UsageError for unknown options, arguments that are not KEY=VALUE, and keys or groups that are given twice;
    ConfigError if a file of a conf/ folder cannot be composed at all.
    """
    line = read_command_line(arguments)
    folders = read_conf_folders(line.config_dirs)
    plan = plan_overrides(line.overrides, folders=folders)
    if plan.misuses:
        raise usage_error(plan.misuses)
    config = _compose_groups(plan, folders)
    problems = [*plan.problems]
    for assignment in plan.assignments:
        if problem := _assign(config, assignment):
            problems.append(problem)
    tree: dict[str, object] = {}
    for key, value in _plain_items(config, "", problems):
        tree[key] = value
    return Composed(tree, tuple(problems), plan.partial, tuple(sorted(folders.choices["recipe"])), plan.choices.get("recipe"))


def _compose_groups(plan: Plan, folders: ConfFolders) -> DictConfig:
    overrides = [
        f"{'' if group in folders.own_groups else '+'}{group}={choice}"
        for group, choice in plan.choices.items()
        if choice is not None
    ]
    if folders.added:
        paths = ",".join(f"'file://{str(path).replace(chr(39), chr(92) + chr(39))}'" for path in folders.added)
        overrides.append(f"hydra.searchpath=[{paths}]")
    try:
        # Leaving the context restores Hydra's global state: nothing of it outlives the composition.
        with initialize_config_dir(str(folders.own), job_name="elastictrain", version_base="1.3"):
            config = hydra_compose("config", overrides)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        wanted = " ".join(f"{group}={choice}" for group, choice in plan.choices.items() if choice is not None)
        raise ConfigError([Problem(wanted or "conf", f"cannot be composed: {_one_line(error)}")]) from error
    if not isinstance(config, DictConfig):
        raise ConfigError([Problem("conf", "must compose to groups of keys")])
    # Hydra refuses to set a group to null that a recipe has set.
    with open_dict(config):
        for group in [group for group, choice in plan.choices.items() if choice is None and group in config]:
            del config[group]
    return config


def _assign(config: DictConfig, assignment: Assignment) -> Problem | None:
    """Lay one value over the composition, or take one away."""
    key = assignment.key
    try:
        if not assignment.deletes:
            OmegaConf.update(config, key, assignment.value, merge=True, force_add=True)
            return None
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        if not isinstance(node, DictConfig) or leaf not in node.keys():  # noqa: SIM118  `in` is false for values not given
            return Problem(key, "cannot be deleted: there is no such key")
        with open_dict(node):
            del node[leaf]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        return Problem(key, f"cannot be set: {_one_line(error)}")
    return None


def _plain_items(node: DictConfig, path: str, problems: list[Problem]) -> list[tuple[str, object]]:
    """The keys of `node` with plain values; a key whose interpolation fails is left out and becomes a problem."""
    items: list[tuple[str, object]] = []
    for name in map(str, node.keys()):
        key = f"{path}.{name}" if path else name
        if OmegaConf.is_missing(node, name):
            items.append((name, NOT_GIVEN))
            continue
        try:
            value = node[name]
            if isinstance(value, DictConfig):
                items.append((name, dict(_plain_items(value, key, problems))))
                continue
            plain = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
        except OmegaConfBaseException as error:
            problems.append(Problem(key, f"cannot be resolved: {_one_line(error)}"))
            continue
        items.append((name, plain))
    return items


def _one_line(error: Exception) -> str:
    """The message without the lines in which OmegaConf names its own nodes."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type=")))
