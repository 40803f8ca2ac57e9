"""From the URL that a person gives to a run, and to the one checkpoint of it that the URL names."""

import os
from dataclasses import dataclass, replace

from elastictrain.checkpoint.folders import ROOT, key_of, read_listing
from elastictrain.checkpoint.second_look import is_there
from elastictrain.checkpoint.signing import SigningKey, load_key
from elastictrain.checkpoint.stored_config import CONFIG_NAME
from elastictrain.errors import ObjectNotFoundError, UsageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class Location:
    """A run, and the name of the checkpoint folder that was asked for, if it was one."""

    run: Store
    folder: str | None = None
    signing: SigningKey | None = None
    """The key that checkpoints must be signed with."""

    @property
    def url(self) -> str:
        """Of the folder of all checkpoints."""
        return f"{self.run.url}/{ROOT}"


def locate(url: str, *, key_env: str = "") -> Location:
    """What `url` means: a run's folder, its folder `checkpoints`, or one checkpoint in that; with the key in `key_env`.

    Raises: ObjectNotFoundError if there is no run; UsageError, also if `key_env` holds no key; ConfigError; StorageError.
    """
    try:
        signing = load_key(key_env)
    except ValueError as error:
        raise UsageError(f"--key-env {error}") from error
    return replace(_locate(url), signing=signing)


def _locate(url: str) -> Location:
    name, parent = split_url(url)
    if is_checkpoint_name(name):
        above, run_url = split_url(parent)
        if above != ROOT:
            raise UsageError(
                f"{url} must lie in a folder {ROOT!r}, as in RUN/{ROOT}/{name}; bring a copy of a checkpoint into such a folder"
            )
        return Location(open_store(run_url), name)
    run = open_store(url)
    if _has_checkpoints(run):
        return Location(run)
    if name == ROOT and _has_checkpoints(above_run := open_store(parent)):
        return Location(above_run)
    # A run writes its configuration first, and a checkpoint much later.
    if not is_there(run, CONFIG_NAME):
        raise ObjectNotFoundError(
            f"{run.url} must be the folder of a run or a checkpoint in it, but holds neither {ROOT}/ nor {CONFIG_NAME}"
        )
    return Location(run)


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of that name can be a checkpoint."""
    return bool(read_listing([ObjectInfo(key_of(name, "file"), 0, 0.0)]).folders)


def split_url(url: str) -> tuple[str, str]:
    """The last part of a path or URL, and what is above it; nothing is above a bucket."""
    protocol, separator, rest = url.rstrip("/").partition("://")
    if separator:
        above, _, name = rest.rpartition("/")
        return (name, f"{protocol}://{above}") if above else ("", url)
    path = os.path.expanduser(url)  # noqa: PTH111
    # By name alone, not by links: what the person calls `checkpoints` counts.
    return os.path.basename(os.path.abspath(path)), os.path.normpath(f"{path}/..")  # noqa: PTH100, PTH119


def _has_checkpoints(run: Store) -> bool:
    return next(iter(run.list(ROOT)), None) is not None
