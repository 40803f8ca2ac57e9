"""A bounded local folder for remote data, shared by all processes of a host, and how shards get into it.

Each entry is a folder with a `use.lock`, on which every reader holds a shared lock (its mtime is the last use), and a
`fill.lock`, which the process that completes the entry holds alone. Locks end with their process, so a SIGKILL leaves nothing
to clean up. Entries are added and removed only under the cache's own lock.
"""

import errno
import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from threading import Event

import xxhash

from elastictrain.data.index import DocumentStarts, Shard, TokenIndex
from elastictrain.errors import DataError, HostUnfitError, ObjectNotFoundError, Problem
from elastictrain.storage.opening import open_store
from elastictrain.storage.private import try_lock
from elastictrain.storage.store import Store

_logger = logging.getLogger(__name__)
_REMOVED = ".removed-"
_PIECE_BYTES = 8 * 2**20
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class CachedFolder:
    name: str
    size_bytes: int
    last_use: float  # unix seconds
    in_use: bool


def choose_evictions(entries: Sequence[CachedFolder], *, needed_bytes: int, budget_bytes: int) -> tuple[str, ...] | None:
    """The entries to remove, least recently used first, so that `needed_bytes` more fit; None if that is impossible."""
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
    """Keeps a folder in the cache until the lease is closed or its process ends."""

    def __init__(self, folder: Path, *, lock: int) -> None:
        """`lock` is the descriptor of the entry's locked `use.lock`; the lease closes it."""
        self.folder = folder
        self.lock = lock

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Wait to be the only process that completes the entry. Closes the lease if that fails."""
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
        """Allow removal of the entry when its space is needed."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class CacheFolder:
    root: Path
    _: KW_ONLY
    budget_bytes: int

    def lease(self, name: str, *, size_bytes: int, source: str) -> CacheLease:
        """Make room for entry `name` of at most `size_bytes`, and hold it; `source` is for messages.

        Raises: DataError if the cache is too small; HostUnfitError if this host's disk is full.
        """
        with explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / "cache.lock").open("a") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._make_room(name, size_bytes=size_bytes, source=source)
                folder = self.root / name
                folder.mkdir(exist_ok=True)
                # Space is reserved before it is used: another process that makes room counts it from now on.
                (folder / "size.json").write_text(json.dumps(size_bytes))
                lease = CacheLease(folder, lock=os.open(folder / "use.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
                fcntl.flock(lease.lock, fcntl.LOCK_SH)
                os.utime(lease.lock)
        return lease

    def _make_room(self, name: str, *, size_bytes: int, source: str) -> None:
        for leftover in self.root.glob(f"{_REMOVED}*"):
            shutil.rmtree(leftover)
        # A user may keep other things in this folder: only entries are touched.
        entries = [_entry(lock.parent) for lock in sorted(self.root.glob("*/use.lock")) if lock.parent.name != name]
        chosen = choose_evictions(entries, needed_bytes=size_bytes, budget_bytes=self.budget_bytes)
        if chosen is None:
            held_bytes = sum(entry.size_bytes for entry in entries if entry.in_use)
            beside = f" beside {held_bytes / 1e9:.3g} GB that other processes of this host are using" if held_bytes else ""
            trouble = (
                f"must be >= {math.ceil((size_bytes + held_bytes) / 1e8) / 10} to hold {source}{beside}, but is "
                f"{self.budget_bytes / 1e9:.3g}; raise it, or copy the data to a local folder and set data.path to that"
            )
            raise DataError([Problem("data.cache_gb", trouble)])
        for victim in chosen:
            # Renamed first, so that no entry is ever half removed, even if this process dies.
            shutil.rmtree((self.root / victim).rename(self.root / f"{_REMOVED}{victim}"))


def _entry(folder: Path) -> CachedFolder:
    try:
        declared = int((folder / "size.json").read_text())
    except (OSError, ValueError):
        declared = 0
    present = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # the process that fills the entry renames files meanwhile
            present += path.stat().st_size
    with (folder / "use.lock").open() as lock:
        in_use = not try_lock(lock.fileno())
        return CachedFolder(folder.name, max(declared, present), os.fstat(lock.fileno()).st_mtime, in_use)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn failures of the local disk into errors that name the remedy."""
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


def fetch_shards(
    store: Store, index: TokenIndex, *, cache: CacheFolder, packing: bool = False
) -> tuple[tuple[Path, ...], CacheLease]:
    """Paths of all shards, with `packing` also of the files beside them, and the lease that keeps them.

    Raises: DataError if a file contradicts the index; StorageError.
    """
    files = index.files if packing else index.shards
    lease = cache.lease(f"tokens-{index.digest}", size_bytes=sum(file.size_bytes for file in files), source=store.url)
    if not all(_is_verified(lease.folder / shard.file, shard) for shard in files):
        with lease.filling():
            # Another process of this host may have completed the entry while this one waited for the lock.
            missing = [shard for shard in files if not _is_verified(lease.folder / shard.file, shard)]
            _fetch_missing(store, missing, folder=lease.folder)
    return tuple(lease.folder / shard.file for shard in files), lease


def read_shard(store: Store, shard: Shard | DocumentStarts, *, take: Callable[[memoryview], object]) -> str:
    """Pass each piece of a shard to `take`, in order; return what is wrong with the shard, as a sentence, or ''."""
    url = f"{store.url}/{shard.file}"
    try:
        size_bytes = store.stat(shard.file).size_bytes
    except ObjectNotFoundError:
        return f"{url} is listed in the index, but does not exist"
    if size_bytes != shard.size_bytes:
        return f"{url} must have {shard.size_bytes} bytes, but has {size_bytes}"
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_PIECE_BYTES, size_bytes)))
    done = 0
    while done < size_bytes and (count := store.read_into(shard.file, buffer[: size_bytes - done], start=done)):
        digest.update(buffer[:count])
        take(buffer[:count])
        done += count
    if digest.hexdigest() != shard.xxh3_128:
        return f"{url} is damaged: its digest must be {shard.xxh3_128}, but is {digest.hexdigest()}"
    return ""


def _as_found(path: Path, shard: Shard | DocumentStarts) -> str:
    """The digest that a file was verified to have, with its size and time then: a changed file is verified again."""
    found = path.stat()
    return f"{shard.xxh3_128} {found.st_size} {found.st_mtime_ns}"


def _is_verified(path: Path, shard: Shard | DocumentStarts) -> bool:
    with suppress(OSError):
        return path.with_name(f"{path.name}.verified").read_text() == _as_found(path, shard)
    return False


def _fetch_missing(store: Store, shards: Sequence[Shard | DocumentStarts], *, folder: Path) -> None:
    for leftover in folder.glob(".*.part"):
        leftover.unlink()
    size_gb = sum(shard.size_bytes for shard in shards) / 1e9
    _logger.info("bringing %d shards (%.3g GB) of %s to %s", len(shards), size_gb, store.url, folder)
    here = open_store(str(folder), follow_links=True)
    stopping = Event()

    def bring(shard: Shard | DocumentStarts) -> None:
        """Have the shard in the folder, verified. Raises: DataError, HostUnfitError, StorageError."""
        # The file may be right without a record of it: a process was killed, or the file's time has changed.
        path = folder / shard.file
        there = path.exists()
        problem = read_shard(here, shard, take=lambda _: None) if there else ""
        if problem:
            _logger.warning("%s; it is fetched again", problem)
        if problem or not there:
            _download(store, shard, folder=folder, stopping=stopping)
        try:
            path.with_name(f"{path.name}.verified").write_text(_as_found(path, shard))
        except OSError as error:
            _logger.warning("%s is verified, but that cannot be recorded: the next start verifies it again: %s", path, error)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetch") as threads:
        try:
            list(threads.map(bring, shards))
        except BaseException:
            stopping.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _download(store: Store, shard: Shard | DocumentStarts, *, folder: Path, stopping: Event) -> None:
    temporary = folder / f".{shard.file}.part"
    problem = ""
    for _ in range(2):  # a second attempt repairs damage on the way, but not damage at the source
        with explained(folder), temporary.open("wb") as file:

            def take(piece: memoryview, write: Callable[[memoryview], object] = file.write) -> None:
                if stopping.is_set():
                    raise CancelledError
                write(piece)

            problem = read_shard(store, shard, take=take)
            file.flush()
            os.fsync(file.fileno())
        if not problem:
            temporary.replace(folder / shard.file)
            return
    temporary.unlink()
    raise DataError(f"{problem}; prepare the data again")
