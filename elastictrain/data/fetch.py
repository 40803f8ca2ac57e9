"""Bring the shards of a remote folder of token files into the cache, once per host, and verify them on the way."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

import xxhash

from elastictrain.bounded_json import DOCUMENT, parse_record
from elastictrain.data.cache import CacheFolder, CacheLease, explained
from elastictrain.data.index import Shard, TokenIndex
from elastictrain.errors import DataError, ObjectNotFoundError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store

_logger = logging.getLogger(__name__)
_PIECE_BYTES = 8 * 2**20
_NUM_THREADS = 4
_VERIFIED_FILE = "verified.json"


def fetch_shards(store: Store, index: TokenIndex, *, cache: CacheFolder) -> tuple[tuple[Path, ...], CacheLease]:
    """Local paths of all shards, and the lease that keeps them there.

    Raises: DataError if a shard is not what the index says; StorageError.
    """
    lease = cache.lease(f"tokens-{index.digest}", size_bytes=index.size_bytes, source=store.url)
    if not all(map(_Verified(lease.folder).holds, index.shards)):
        with lease.filling():
            # Another process of this host may have done the work while this one waited for the lock.
            verified = _Verified(lease.folder)
            missing = [shard for shard in index.shards if not verified.holds(shard)]
            _fetch_missing(store, missing, verified=verified, folder=lease.folder)
    return tuple(lease.folder / shard.file for shard in index.shards), lease


def read_shard(store: Store, shard: Shard, *, take: Callable[[memoryview], object]) -> str:
    """Hands each piece of a shard to `take`, in order; what is wrong with the shard, as a sentence, or nothing."""
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


class _Verified:
    """Which files were found to have their digest, and the size and time they had then: a file that changed is checked
    again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        try:
            text = (folder / _VERIFIED_FILE).read_bytes()
            self._files = parse_record(text, dict[str, tuple[str, int, int]], limits=DOCUMENT)
        except (OSError, ValueError):
            self._files = {}

    def holds(self, shard: Shard) -> bool:
        """Whether the file is there, unchanged since its digest was last found right."""
        try:
            return self._files.get(shard.file) == self._as_it_is(shard)
        except OSError:
            return False

    def add(self, shard: Shard) -> None:
        """Remember that the file as it is now is right."""
        with self._lock:
            self._files[shard.file] = self._as_it_is(shard)
            temporary = self._folder / f".{_VERIFIED_FILE}.part"
            temporary.write_text(json.dumps(self._files))
            temporary.replace(self._folder / _VERIFIED_FILE)

    def _as_it_is(self, shard: Shard) -> tuple[str, int, int]:
        found = (self._folder / shard.file).stat()
        return shard.xxh3_128, found.st_size, found.st_mtime_ns


def _fetch_missing(store: Store, shards: Sequence[Shard], *, verified: _Verified, folder: Path) -> None:
    for leftover in folder.glob(".*.part"):
        leftover.unlink()
    size_gb = sum(shard.size_bytes for shard in shards) / 1e9
    _logger.info("bringing %d shards (%.3g GB) of %s to %s", len(shards), size_gb, store.url, folder)
    here = open_store(str(folder), follow_links=True)
    stopping = Event()

    def bring(shard: Shard) -> None:
        # It may be right although nobody has noted that: a process was killed, or the file's time is another one.
        there = (folder / shard.file).exists()
        problem = read_shard(here, shard, take=lambda _: None) if there else ""
        if problem:
            _logger.warning("%s; it is fetched again", problem)
        if problem or not there:
            _download(store, shard, folder=folder, stopping=stopping)
        verified.add(shard)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetch") as threads:
        try:
            for _ in threads.map(bring, shards):
                pass
        except BaseException:
            stopping.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _download(store: Store, shard: Shard, *, folder: Path, stopping: Event) -> None:
    temporary = folder / f".{shard.file}.part"
    problem = ""
    for _ in range(2):  # bytes damaged on the way are right the second time, damaged at the source they are not
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
