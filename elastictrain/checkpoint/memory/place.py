"""The folder of a run in host memory: found by everybody on the host who knows the run, entered by its owner alone."""

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from elastictrain.errors import ConfigError, Problem

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
                _make(path)
            except FileNotFoundError:
                # The keeper of this user's last run has just removed the parent, or there never was one.
                if path == folder:
                    _make(parent)
                _make(path)
            # A link would lead to a folder that somebody else may own; lstat sees the link itself.
            found = os.lstat(path)
        except OSError as error:
            raise ConfigError([Problem("checkpoint.memory_dir", f"{path} cannot be made: {error.strerror}")]) from error
        private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not private:
            message = f"{path} must be a folder that user {os.getuid()} alone can enter, but has owner {found.st_uid}"
            raise ConfigError([Problem("checkpoint.memory_dir", f"{message} and mode {stat.filemode(found.st_mode)}")])


def _make(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102
