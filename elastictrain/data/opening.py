"""From the data keys of a run to its data sets."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastictrain.config.data import DataGroup
from elastictrain.data.cache import CacheFolder, default_cache_dir
from elastictrain.data.corpus import STDLIB, library_folder, prepare_stdlib
from elastictrain.data.dataset import Dataset
from elastictrain.data.fetch import fetch_shards
from elastictrain.data.index import TokenIndex, TokenizerDescription, read_index
from elastictrain.data.split import split_samples
from elastictrain.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of
from elastictrain.data.tokens import TokenDataset
from elastictrain.errors import DataError
from elastictrain.storage.local import LocalStore
from elastictrain.storage.nofollow import describe
from elastictrain.storage.opening import open_store


@dataclass(frozen=True, slots=True)
class DataDescription:
    """What is read, for the record of the run."""

    source: str
    digest: str
    """Names the tokens: ranks that train together must have the same."""

    num_tokens: int
    num_train_samples: int
    num_holdout_samples: int
    tokenizer: TokenizerDescription


@dataclass(frozen=True, slots=True)
class OpenedData:
    """The samples to train on, those held out (None if there are none), and what they are."""

    train: Dataset
    holdout: Dataset | None
    description: DataDescription


def open_datasets(options: DataGroup, *, seq_len: int, environment: Mapping[str, str] = os.environ) -> OpenedData:
    """The data sets of a run; brings remote token files to this host, or prepares the `stdlib` corpus, if they are not there
    yet.

    Safe to call on all ranks of a host at once: one does the work and the others wait.

    Raises: DataError, HostUnfitError, StorageError.
    """
    index, paths, lease = _open_files(options, environment=environment)
    split = split_samples(
        index.num_tokens, seq_len=seq_len, holdout_samples=options.holdout_samples, source=f"data.path={options.path}"
    )

    def part(first_sample: int, num_samples: int) -> Dataset:
        return TokenDataset(
            index, paths=paths, seq_len=seq_len, first_sample=first_sample, num_samples=num_samples, lease=lease
        )

    return OpenedData(
        train=part(0, split.train),
        holdout=part(split.train, split.holdout) if split.holdout else None,
        description=DataDescription(
            source=options.path,
            digest=index.digest,
            num_tokens=index.num_tokens,
            num_train_samples=split.train,
            num_holdout_samples=split.holdout,
            tokenizer=index.tokenizer,
        ),
    )


def open_tokenizer(options: DataGroup) -> Tokenizer:
    """The tokenizer of the run's data. Raises: DataError, StorageError; UsageError if it needs an extra that is not
    installed."""
    if options.path == STDLIB:
        return ByteTokenizer()
    store = open_store(options.path, follow_links=True)
    return tokenizer_of(store, read_index(store))


def _open_files(options: DataGroup, *, environment: Mapping[str, str]) -> tuple[TokenIndex, tuple[Path, ...], object]:
    root = Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(environment)
    cache = CacheFolder(root, budget_bytes=int(options.cache_gb * 1e9))
    if options.path == STDLIB:
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
