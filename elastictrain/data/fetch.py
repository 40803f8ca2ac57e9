"""Bring the shards of a remote folder of token files into the cache, once per host, and verify them on the way."""

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

import xxhash

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.data.cache import CacheFolder, CacheLease, explained
from elastictrain.data.index import Shard, TokenIndex
from elastictrain.errors import DataError, ObjectNotFoundError
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
    try:
        ledger = _Verified(lease.folder)
        if not all(ledger.holds(shard) for shard in index.shards):
            with lease.filling():
                # Another process of this host may have done the work while this one waited for the lock.
                ledger = _Verified(lease.folder)
                missing = [shard for shard in index.shards if not ledger.holds(shard)]
                _fetch_missing(store, missing, ledger=ledger, folder=lease.folder)
    except BaseException:
        lease.close()
        raise
    return tuple(lease.folder / shard.file for shard in index.shards), lease


class _Verified:
    """Which files were found to have their digest, and the size and time they had then: a file that changed is checked
    again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        try:
            self._files: dict[str, object] = dict(parse_json((folder / _VERIFIED_FILE).read_text(), limits=DOCUMENT))
        except (OSError, ValueError, TypeError):
            self._files = {}

    def holds(self, shard: Shard) -> bool:
        """Whether the file is there, unchanged since its digest was last found right."""
        try:
            found = (self._folder / shard.file).stat()
        except OSError:
            return False
        return self._files.get(shard.file) == [shard.xxh3_128, found.st_size, found.st_mtime_ns]

    def add(self, shard: Shard) -> None:
        """Remember that the file as it is now is right."""
        found = (self._folder / shard.file).stat()
        with self._lock:
            self._files[shard.file] = [shard.xxh3_128, found.st_size, found.st_mtime_ns]
            temporary = self._folder / f".{_VERIFIED_FILE}.part"
            temporary.write_text(json.dumps(self._files))
            temporary.replace(self._folder / _VERIFIED_FILE)


def _fetch_missing(store: Store, shards: Sequence[Shard], *, ledger: _Verified, folder: Path) -> None:
    for leftover in folder.glob(".*.part"):
        leftover.unlink()
    _logger.info(
        "bringing %d shards (%.3g GB) of %s to %s", len(shards), sum(s.size_bytes for s in shards) / 1e9, store.url, folder
    )
    stopping = Event()

    def bring(shard: Shard) -> None:
        if not _is_right(folder / shard.file, shard):
            _download(store, shard, folder=folder, stopping=stopping)
        ledger.add(shard)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetch") as threads:
        try:
            for _ in threads.map(bring, shards):
                pass
        except BaseException:
            stopping.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _is_right(path: Path, shard: Shard) -> bool:
    if not path.exists() or path.stat().st_size != shard.size_bytes:
        return False
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() == shard.xxh3_128:
        return True
    _logger.warning(
        "%s is damaged: its digest must be %s, but is %s; it is fetched again", path, shard.xxh3_128, digest.hexdigest()
    )
    return False


def _download(store: Store, shard: Shard, *, folder: Path, stopping: Event) -> None:
    url = f"{store.url}/{shard.file}"
    try:
        found = store.stat(shard.file)
    except ObjectNotFoundError:
        raise DataError(f"{url} is listed in the index but does not exist; prepare the data again") from None
    if found.size_bytes != shard.size_bytes:
        raise DataError(f"{url} must have {shard.size_bytes} bytes, but has {found.size_bytes}; prepare the data again")
    digest = ""
    for _ in range(2):  # bytes damaged on the way are right the second time, damaged at the source they are not
        temporary = folder / f".{shard.file}.part"
        digest = _copy(store, shard, target=temporary, stopping=stopping)
        if digest == shard.xxh3_128:
            temporary.replace(folder / shard.file)
            return
        temporary.unlink()
    raise DataError(f"{url} is damaged: its digest must be {shard.xxh3_128}, but is {digest}; prepare the data again")


def _copy(store: Store, shard: Shard, *, target: Path, stopping: Event) -> str:
    """Copies one shard to `target`, durably; returns the digest of what arrived."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_PIECE_BYTES, shard.size_bytes)))
    copied = 0
    with explained(target.parent), target.open("wb") as file:
        while copied < shard.size_bytes and not stopping.is_set():
            size = store.read_into(shard.file, buffer[: shard.size_bytes - copied], start=copied)
            if size == 0:
                break
            digest.update(buffer[:size])
            file.write(buffer[:size])
            copied += size
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
