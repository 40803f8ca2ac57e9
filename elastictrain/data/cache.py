"""A bounded local folder for data that is elsewhere, shared by all processes of a host.

Each entry is a folder with a `use.lock`, on which everyone who reads the entry holds a shared lock (its time is the time of
the last use), and a `fill.lock`, which whoever completes the entry holds alone. Locks end with their process, so nothing is
left to clean up after a SIGKILL. Entries come and go only under the cache's own lock.
"""

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastictrain.errors import DataError, HostUnfitError, Problem

_REMOVED = ".removed-"


@dataclass(frozen=True, slots=True)
class Entry:
    """One data set in the cache."""

    name: str
    size_bytes: int
    last_use: float
    in_use: bool


def choose_evictions(entries: Sequence[Entry], *, needed_bytes: int, budget_bytes: int) -> tuple[str, ...] | None:
    """The entries to remove, least recently used first, so that `needed_bytes` more fit; None if that cannot be done."""
    excess = sum(entry.size_bytes for entry in entries) + needed_bytes - budget_bytes
    chosen = []
    for entry in sorted(entries, key=lambda entry: (entry.last_use, entry.name)):
        if excess <= 0:
            break
        if not entry.in_use:
            chosen.append(entry.name)
            excess -= entry.size_bytes
    return tuple(chosen) if excess <= 0 else None


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """`elastictrain` below $XDG_CACHE_HOME, or below ~/.cache."""
    base = environment.get("XDG_CACHE_HOME", "")
    # Source: XDG Base Directory Specification: a relative path there is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "elastictrain"


class CacheLease:
    """A folder in the cache that stays there until the lease is closed or its process ends."""

    def __init__(self, folder: Path, *, lock: int) -> None:
        """`lock` is the descriptor of the entry's `use.lock`, locked; the lease closes it."""
        self.folder = folder
        self.lock = lock

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Be the only process that completes the entry; waits until no other does. Closes the lease if that fails."""
        try:
            with explained(self.folder):
                lock = (self.folder / "fill.lock").open("a")
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the entry be removed when its space is needed."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __del__(self) -> None:
        self.close()


class CacheFolder:
    """The cache below `root`, at most `budget_bytes` large."""

    def __init__(self, root: Path, *, budget_bytes: int) -> None:
        self._root = root
        self._budget_bytes = budget_bytes

    def lease(self, name: str, *, size_bytes: int, source: str) -> CacheLease:
        """Make room for the entry `name` with `size_bytes` at most, and hold it; `source` is for messages.

        Raises: DataError if the cache is too small; HostUnfitError if this host's disk is full.
        """
        with explained(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            with (self._root / "cache.lock").open("a") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._make_room(name, size_bytes=size_bytes, source=source)
                folder = self._root / name
                folder.mkdir(exist_ok=True)
                # Space is reserved before it is used: another process that makes room counts it from now on.
                (folder / "size.json").write_text(json.dumps(size_bytes))
                lease = CacheLease(folder, lock=os.open(folder / "use.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
                fcntl.flock(lease.lock, fcntl.LOCK_SH)
                os.utime(lease.lock)
        return lease

    def _make_room(self, name: str, *, size_bytes: int, source: str) -> None:
        for leftover in self._root.glob(f"{_REMOVED}*"):
            shutil.rmtree(leftover)
        # The folder may be one that a person also keeps other things in: what is not an entry is left alone.
        entries = [_entry(lock.parent) for lock in sorted(self._root.glob("*/use.lock")) if lock.parent.name != name]
        chosen = choose_evictions(entries, needed_bytes=size_bytes, budget_bytes=self._budget_bytes)
        if chosen is None:
            held_bytes = sum(entry.size_bytes for entry in entries if entry.in_use)
            beside = f" beside {held_bytes / 1e9:.3g} GB that other processes of this host are using" if held_bytes else ""
            trouble = (
                f"must be >= {math.ceil((size_bytes + held_bytes) / 1e8) / 10} to hold {source}{beside}, but is "
                f"{self._budget_bytes / 1e9:.3g}; raise it, or copy the data to a local folder and set data.path to that"
            )
            raise DataError([Problem("data.cache_gb", trouble)])
        for victim in chosen:
            # Renamed first, so that an entry is never found half removed, whenever this process dies.
            shutil.rmtree((self._root / victim).rename(self._root / f"{_REMOVED}{victim}"))


def _entry(folder: Path) -> Entry:
    try:
        declared = int((folder / "size.json").read_text())
    except (OSError, ValueError):
        declared = 0
    present = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # whoever fills the entry renames files meanwhile
            present += path.stat().st_size
    with (folder / "use.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            in_use = False
        except BlockingIOError:
            in_use = True
        return Entry(folder.name, max(declared, present), os.fstat(lock.fileno()).st_mtime, in_use)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns failures of the local disk into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostUnfitError(
                f"the disk of the cache folder {path} must have room for the data, but is full; free space, lower "
                "`data.cache_gb`, or set `data.cache_dir` to a folder on a larger disk"
            ) from error
        raise DataError(
            [Problem("data.cache_dir", f"must be a folder that can be written, but {path} is not: {error}; set another folder")]
        ) from error
