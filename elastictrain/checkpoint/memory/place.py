"""The folder of a run in host memory: found by everybody on the host who knows the run, entered by its owner alone."""

import logging
import os
import re
from dataclasses import dataclass

import xxhash

from elastictrain.errors import ConfigError, Problem
from elastictrain.storage.failures import reason_of
from elastictrain.storage.private import NameTakenError, make_private_folder, why_not_private

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"(own|replica)-r(\d{5,})-s(\d)")


@dataclass(frozen=True, slots=True)
class SlotName:
    """Name of a slot file: of this host's rank, or a replica of another's."""

    kind: str
    rank: int
    index: int

    def __str__(self) -> str:
        return f"{self.kind}-r{self.rank:05d}-s{self.index}"


def parse_slot_name(name: str) -> SlotName | None:
    """The inverse of `str`; None for files of another kind."""
    match = _SLOT.fullmatch(name)
    return SlotName(match[1], int(match[2]), int(match[3])) if match else None


def run_name(run_url: str) -> str:
    """The same for all who mean the same folder on one host."""
    url = run_url if "://" in run_url else os.path.realpath(os.path.expanduser(run_url))  # noqa: PTH111
    return xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())


def user_folder(memory_dir: str) -> str:
    """The folder of this user in host memory; one folder per run lies in it."""
    return f"{memory_dir.rstrip('/')}/elastictrain-{os.getuid()}"


def run_folder(memory_dir: str, run_url: str) -> str:
    """The folder of the run in host memory."""
    return f"{user_folder(memory_dir)}/{run_name(run_url)}"


def make_private(folder: str) -> None:
    """Makes a folder and its parent, for this user alone.

    Raises: ConfigError if either belongs to somebody else, who could then put snapshots there, or cannot be made.
    """
    parent = os.path.dirname(folder)  # noqa: PTH120
    for path in (parent, folder):
        try:
            try:
                make_private_folder(path)
            except FileNotFoundError:
                # The saver of this user's last run has just removed the parent, or there never was one.
                if path == folder:
                    make_private_folder(parent)
                make_private_folder(path)
        except NameTakenError as error:
            message = f"cannot be used: {reason_of(error)}; or set another folder"
            raise ConfigError([Problem("checkpoint.memory_dir", message)]) from error
        except OSError as error:
            raise ConfigError([Problem("checkpoint.memory_dir", f"{path} cannot be made: {error.strerror}")]) from error


def is_private(folder: str) -> bool:
    """Whether what is in a run's folder can only be this user's; also if the folder is not there. One that is not is told."""
    for path in (os.path.dirname(folder), folder):  # noqa: PTH120
        try:
            found = os.lstat(path)
        except OSError:
            return True
        if why := why_not_private(path, found, folder=True, own_uid=os.getuid()):
            logger.warning("snapshots in host memory are passed over: %s", why)
            return False
    return True
