"""Composes arguments to one plain mapping through Hydra's compose API, without checking values.

Hydra composes the groups only. Values are assigned to its result one by one, so that every key that does not fit is
reported, not just the first. Nothing is written, and neither the working directory nor logging is touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]

from elastictrain.config.command_line import parse_overrides, read_command_line
from elastictrain.config.validate import NOT_GIVEN
from elastictrain.errors import ConfigError, ElasticTrainError, Problem, UsageError


@dataclass(frozen=True, slots=True)
class Composed:
    """The composition of conf/ and the command line, not yet checked."""

    tree: dict[str, object]  # group -> key -> resolved plain value; "???" where a required value is missing
    problems: tuple[Problem, ...]  # values that could not be read or resolved; reported with the checks' problems
    partial: bool  # whether a group's choice is unknown: then missing keys are no problem
    recipes: tuple[str, ...]
    recipe: str | None


def own_conf() -> Path:
    """conf/ beside the modules of an installed package, or beside the package in a checkout."""
    # `elastictrain.__file__` is None in the folder above a checkout named elastictrain.
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ElasticTrainError(f"{package / 'conf'} must hold the configuration files, but does not; install elastictrain again")


def read_choices(config_dirs: Sequence[str]) -> Mapping[str, Mapping[str, Path]]:
    """Group -> choice -> its file. Raises: UsageError if a folder does not exist, or two files have the same name."""
    added = [Path(name).expanduser().resolve() for name in config_dirs]
    problems = [f"--config-dir must be a folder, but {folder} is not" for folder in added if not folder.is_dir()]
    choices: dict[str, dict[str, Path]] = {}
    for folder in (own_conf(), *added):
        for file in sorted(folder.rglob("*.yaml")):
            group, *rest = file.relative_to(folder).with_suffix("").parts
            if not rest:
                continue
            known = choices.setdefault(group, {}).setdefault("/".join(rest), file)
            if known != file:
                problems.append(f"{file} must not have the name of {known}; rename it")
    if problems:
        raise UsageError("; ".join(problems))
    return choices


def compose(arguments: Sequence[str]) -> Composed:
    """Compose a run from `recipe=`, groups' choices, values and `--config-dir`. Raises: UsageError; ConfigError."""
    line = read_command_line(arguments)
    known = read_choices(line.config_dirs)
    choices, values, unknown = parse_overrides(line.overrides, known=known)
    config = _compose_groups(choices, line.config_dirs)
    problems = [*unknown, *filter(None, [_assign(config, override) for override in values])]
    tree = _plain_items(config, "", problems)
    return Composed(tree, tuple(problems), bool(unknown), tuple(sorted(known["recipe"])), choices.get("recipe"))


def _compose_groups(choices: Mapping[str, str | None], config_dirs: Sequence[str]) -> DictConfig:
    own = own_conf()
    wanted = [f"{group}={choice}" for group, choice in choices.items() if choice is not None]
    overrides = [one if (own / one.partition("=")[0]).is_dir() else f"+{one}" for one in wanted]
    added = [str(Path(name).expanduser().resolve()).replace("'", "\\'") for name in config_dirs]
    if added:
        paths = ",".join(f"'file://{path}'" for path in added)
        overrides.append(f"hydra.searchpath=[{paths}]")
    try:
        # Leaving the context restores Hydra's global state.
        with initialize_config_dir(str(own), job_name="elastictrain", version_base="1.3"):
            config = hydra_compose("config", overrides)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        message = f"cannot be composed: {_one_line(error)}"
        if "@recipe." in message:
            message += " The first line of a recipe must be `# @package _global_`"
        raise ConfigError([Problem(" ".join(wanted) or "conf", message)]) from error
    if not isinstance(config, DictConfig):
        raise ConfigError([Problem("conf", "must compose to groups of keys")])
    # Hydra refuses to set a group to null that a recipe has set.
    with open_dict(config):
        for group in [group for group, choice in choices.items() if choice is None and group in config]:
            del config[group]
    return config


def _assign(config: DictConfig, override: Override) -> Problem | None:
    key = override.key_or_group
    try:
        if not override.is_delete():
            OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
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


def _plain_items(node: DictConfig, path: str, problems: list[Problem]) -> dict[str, object]:
    """`node` with plain values; a key whose interpolation fails is left out and becomes a problem."""
    items: dict[str, object] = {}
    for name in map(str, node.keys()):
        key = f"{path}.{name}" if path else name
        if OmegaConf.is_missing(node, name):
            items[name] = NOT_GIVEN
            continue
        try:
            value = node[name]
            if isinstance(value, DictConfig):
                items[name] = _plain_items(value, key, problems)
            else:
                items[name] = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
        except OmegaConfBaseException as error:
            problems.append(Problem(key, f"cannot be resolved: {_one_line(error)}"))
    return items


def _one_line(error: Exception) -> str:
    """The message without the lines in which OmegaConf names its own nodes."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type=")))
