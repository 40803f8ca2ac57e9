"""Reads which groups and choices the conf/ folders hold: the program's own, and those a person adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastictrain.errors import ElasticTrainError, UsageError


@dataclass(frozen=True, slots=True)
class ConfFolders:
    """Every choice of every group."""

    own: Path
    """The program's conf/."""

    added: tuple[Path, ...]
    """Those of `--config-dir`."""

    choices: Mapping[str, Mapping[str, Path]]
    """Group (`recipe`, `model`, ...) -> choice -> file."""

    own_groups: frozenset[str]
    """Groups of the program; each is in the defaults list of conf/config.yaml."""


def own_conf() -> Path:
    """conf/ beside the modules of an installed package, or beside the package in a checkout."""
    # Not by `elastictrain.__file__`: in the folder above a checkout of that name the package has none.
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ElasticTrainError(f"{package / 'conf'} must hold the configuration files, but does not; install elastictrain again")


def read_conf_folders(config_dirs: Sequence[str]) -> ConfFolders:
    """Raises: UsageError if a folder is not there or has a file of the same name as another."""
    own = own_conf()
    added = tuple(Path(name).expanduser().resolve() for name in config_dirs)
    problems = [f"--config-dir must be a folder, but {folder} is not" for folder in added if not folder.is_dir()]
    choices: dict[str, dict[str, Path]] = {}
    own_groups: set[str] = set()
    for folder in (own, *added):
        for file in sorted(folder.rglob("*.yaml")):
            group, *rest = file.relative_to(folder).with_suffix("").parts
            if not rest:
                continue
            name = "/".join(rest)
            if folder == own:
                own_groups.add(group)
            if name in choices.setdefault(group, {}):
                problems.append(f"{file} must not have the name of {choices[group][name]}; rename it")
            choices[group][name] = file
    if problems:
        raise UsageError("; ".join(problems))
    return ConfFolders(own, added, choices, frozenset(own_groups))


def first_comment(file: Path) -> str:
    """What a file says about itself: its first comment that is not an instruction to Hydra."""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if line.startswith("#") and text and not text.startswith("@"):
            return text
    return ""
