"""Which samples are trained on and which are held out, and whether the data suffices at all."""

from dataclasses import dataclass

from elastictrain.config.data import DataGroup
from elastictrain.data.cache import check_fits
from elastictrain.data.corpus import STDLIB, find_sources, library_folder
from elastictrain.data.index import read_index
from elastictrain.errors import ConfigError, DataError, Problem
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store


@dataclass(frozen=True, slots=True)
class Split:
    """Samples [0, train) are trained on, and the `holdout` after them evaluated."""

    train: int
    holdout: int


def split_samples(num_tokens: int, *, seq_len: int, holdout_samples: int, source: str) -> Split:
    """The last `holdout_samples` samples are held out, the others are for training; `source` is for messages.

    Raises: DataError if nothing would be left to train on.
    """
    num_samples = max(0, (num_tokens - 1) // seq_len)
    if num_samples == 0:
        raise DataError(
            [
                Problem(
                    "train.seq_len",
                    f"must be <= {max(0, num_tokens - 1)}, since {source} has {num_tokens} tokens and a sample needs "
                    f"seq_len + 1 of them, but is {seq_len}; lower it, or set data.path to more text",
                )
            ]
        )
    if holdout_samples >= num_samples:
        raise DataError(
            [
                Problem(
                    "data.holdout_samples",
                    f"must be < {num_samples}, the samples of {seq_len} tokens in {source}, but is {holdout_samples}; "
                    "lower it, or set data.path to more text",
                )
            ]
        )
    return Split(num_samples - holdout_samples, holdout_samples)


def check_data(options: DataGroup, *, seq_len: int) -> tuple[Problem, ...]:
    """What is wrong with the data keys, found by reading nothing but the index.

    Raises: StorageError if the store of `data.path` cannot be reached.
    """
    try:
        if options.path == STDLIB:
            sources = find_sources(library_folder())
            num_tokens = sum(source.size_bytes for source in sources) + len(sources)
        else:
            store = open_store(options.path, follow_links=True)
            index = read_index(store)
            num_tokens = index.num_tokens
            if not isinstance(store, LocalStore):
                check_fits(index.size_bytes, budget_bytes=int(options.cache_gb * 1e9), source=store.url)
        split_samples(num_tokens, seq_len=seq_len, holdout_samples=options.holdout_samples, source=options.path)
    except ConfigError as error:
        return error.problems or (Problem("data.path", str(error)),)
    return ()
