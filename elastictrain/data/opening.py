"""From the data keys of a run to its data sets."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastictrain.config.composed import DataGroup
from elastictrain.data.cache import CacheFolder, default_cache_dir, fetch_shards
from elastictrain.data.corpus import library_folder, prepare_stdlib
from elastictrain.data.dataset import Dataset
from elastictrain.data.index import TokenIndex, read_index
from elastictrain.data.tokens import TokenDataset
from elastictrain.errors import DataError, Problem
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.posix import describe


@dataclass(frozen=True, slots=True)
class OpenedData:
    """The samples to train on, those held out (None if there are none), and the index of the token files they are from."""

    train: Dataset
    holdout: Dataset | None
    index: TokenIndex


def open_datasets(options: DataGroup, *, seq_len: int, environment: Mapping[str, str] = os.environ) -> OpenedData:
    """The data sets of a run; brings remote token files to this host, or prepares the `stdlib` corpus, if they are not there
    yet.

    Safe to call on all ranks of a host at once: one does the work and the others wait.

    Raises: DataError, HostUnfitError, StorageError.
    """
    index, paths, lease = _open_files(options, environment=environment)
    num_train = training_samples(
        index.num_tokens, seq_len=seq_len, holdout_samples=options.holdout_samples, source=f"data.path={options.path}"
    )

    def part(first_sample: int, num_samples: int) -> Dataset:
        return TokenDataset(
            index, paths=paths, seq_len=seq_len, first_sample=first_sample, num_samples=num_samples, lease=lease
        )

    holdout = part(num_train, options.holdout_samples) if options.holdout_samples else None
    return OpenedData(part(0, num_train), holdout, index)


def training_samples(num_tokens: int, *, seq_len: int, holdout_samples: int, source: str) -> int:
    """How many samples are trained on: all but the last `holdout_samples`; `source` is for messages.

    Raises: DataError if nothing would be left to train on.
    """
    num_samples = max(0, (num_tokens - 1) // seq_len)
    if num_samples == 0:
        key = "train.seq_len"
        trouble = (
            f"must be <= {max(0, num_tokens - 1)}, since {source} has {num_tokens} tokens and a sample needs seq_len + 1 of "
            f"them, but is {seq_len}"
        )
    elif holdout_samples >= num_samples:
        key = "data.holdout_samples"
        trouble = f"must be < {num_samples}, the samples of {seq_len} tokens in {source}, but is {holdout_samples}"
    else:
        return num_samples - holdout_samples
    raise DataError([Problem(key, f"{trouble}; lower it, or set data.path to more text")])


def _open_files(options: DataGroup, *, environment: Mapping[str, str]) -> tuple[TokenIndex, tuple[Path, ...], object]:
    root = Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(environment)
    cache = CacheFolder(root, budget_bytes=int(options.cache_gb * 1e9))
    if options.path == "stdlib":
        index, folder, lease = prepare_stdlib(cache, library=library_folder())
        return index, _in_place(index, folder=folder), lease
    store = open_store(options.path, follow_links=True)
    index = read_index(store)
    if isinstance(store, LocalStore):
        return index, _in_place(index, folder=Path(store.root)), None
    paths, lease = fetch_shards(store, index, cache=cache)
    return index, paths, lease


def _in_place(index: TokenIndex, *, folder: Path) -> tuple[Path, ...]:
    """The shards where they are; their sizes are checked, since reading a mapped file that is too short would kill the
    process."""
    for shard in index.shards:
        path = folder / shard.file
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path} must be a readable shard, but is not: {error.strerror}; prepare the data again") from None
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} must be a regular file, but is {describe(found.st_mode) or 'a folder'}")
        if found.st_size != shard.size_bytes:
            raise DataError(f"{path} must have {shard.size_bytes} bytes, but has {found.st_size}; prepare the data again")
    return tuple(folder / shard.file for shard in index.shards)
