"""Opens the data sets that the data keys of a run name.

`stdlib` is a corpus that every machine has: the source text of the Python standard library that runs the program.
"""

import logging
import os
import stat
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from elastictrain.config.composed import DataGroup
from elastictrain.data.cache import CacheFolder, CacheLease, default_cache_dir, fetch_shards
from elastictrain.data.dataset import Dataset
from elastictrain.data.encoding import Encoder
from elastictrain.data.index import DocumentStarts, Shard, TokenIndex, read_index
from elastictrain.data.mixture import MixedDataset, Mixture, make_mixture
from elastictrain.data.packing import PackedDataset, document_starts, pack
from elastictrain.data.prepare import prepare
from elastictrain.data.sources import SourceFile
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.data.tokens import TokenDataset
from elastictrain.errors import DataError, Problem
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.posix import describe

_logger = logging.getLogger(__name__)
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class OpenedData:
    """Training samples, held-out samples (None if there are none), and the token files of the first source."""

    train: Dataset
    holdout: Dataset | None
    index: TokenIndex
    digest: str  # names the content of all sources
    mixture: Mixture | None = None


def open_datasets(
    options: DataGroup, *, seq_len: int, global_batch: int = 1, environment: Mapping[str, str] = os.environ
) -> OpenedData:
    """Open the data sets of a run; fetch remote token files, or prepare the `stdlib` corpus, if this host lacks them.

    `global_batch` tells the positions at which weights change. All ranks of a host may call it at once: one does the work and
    the others wait. Raises: ConfigError, DataError, HostUnfitError, StorageError.
    """
    root = Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(environment)
    cache = CacheFolder(root, budget_bytes=int(options.cache_gb * 1e9))
    if options.sources is None:
        return _open_source(options.path, key="data.path", options=options, seq_len=seq_len, cache=cache)
    keys = [f"data.sources[{number}].path" for number in range(len(options.sources))]
    opened = [
        _open_source(source.path, key=key, options=options, seq_len=seq_len, cache=cache)
        for source, key in zip(options.sources, keys, strict=True)
    ]
    others = [key for key, one in zip(keys, opened, strict=True) if one.index.tokenizer != opened[0].index.tokenizer]
    if others:
        trouble = f"must hold tokens of the same tokenizer as {keys[0]}, but holds others; prepare it with that tokenizer"
        raise DataError([Problem(key, trouble) for key in others])
    mixture = make_mixture(options.sources, sizes=[len(one.train) for one in opened], global_batch=global_batch)
    holdouts = [one.holdout for one in opened if one.holdout is not None]
    return OpenedData(
        MixedDataset([one.train for one in opened]),
        MixedDataset(holdouts, in_turn=True) if holdouts else None,
        opened[0].index,
        xxhash.xxh3_128_hexdigest("\n".join(one.digest for one in opened).encode()),
        mixture,
    )


def _open_source(path: str, *, key: str, options: DataGroup, seq_len: int, cache: CacheFolder) -> OpenedData:
    lease: object = None
    if path == "stdlib":
        index, folder, lease = prepare_stdlib(cache, library=library_folder())
        paths = _in_place(index.files, folder=folder)
    else:
        store = open_store(path, follow_links=True)
        index = read_index(store)
        if isinstance(store, LocalStore):
            paths = _in_place(index.files if options.packing else index.shards, folder=Path(store.root))
        else:
            paths, lease = fetch_shards(store, index, cache=cache, packing=options.packing)
    part = partial(TokenDataset, index, paths=paths[: len(index.shards)], seq_len=seq_len, lease=lease)
    holdout_samples, num_tokens = options.holdout_samples, index.num_tokens
    if options.packing:
        starts = document_starts(index, paths=paths)
        ranges = pack(starts, num_tokens=num_tokens, seq_len=seq_len)
        num_tokens = len(ranges) * seq_len + 1
    num_train = training_samples(num_tokens, seq_len=seq_len, holdout_samples=holdout_samples, source=f"{key}={path}")
    if options.packing:
        whole = part(first_sample=0, num_samples=0)
        train, rest = (PackedDataset(whole, starts, ranges[one]) for one in (slice(num_train), slice(num_train, None)))
        return OpenedData(train, rest if holdout_samples else None, index, index.digest)
    holdout = part(first_sample=num_train, num_samples=holdout_samples) if holdout_samples else None
    return OpenedData(part(first_sample=0, num_samples=num_train), holdout, index, index.digest)


def training_samples(num_tokens: int, *, seq_len: int, holdout_samples: int, source: str) -> int:
    """All samples but the last `holdout_samples`; `source` is for messages. Raises: DataError if none is left to train on."""
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


def _in_place(files: Sequence[Shard | DocumentStarts], *, folder: Path) -> tuple[Path, ...]:
    """Paths of local shards. Sizes are checked, because reading a mapped file that is too short would kill the process."""
    for shard in files:
        path = folder / shard.file
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path} must be a readable shard, but is not: {error.strerror}; prepare the data again") from None
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} must be a regular file, but is {describe(found.st_mode) or 'a folder'}")
        if found.st_size != shard.size_bytes:
            raise DataError(f"{path} must have {shard.size_bytes} bytes, but has {found.st_size}; prepare the data again")
    return tuple(folder / shard.file for shard in files)


def library_folder() -> Path:
    """The standard library of this Python, also in a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def belongs(name: str) -> bool:
    """Whether the file `name` (relative to the library's folder, with '/') belongs to the corpus.

    Tests, installed packages, and files that a distributor generates or adds do not: two builds of one Python version have the
    same corpus.
    """
    *folders, file = name.split("/")
    if not file.endswith(".py") or _LEFT_OUT.intersection(folders):
        return False
    return not file.startswith("_sysconfigdata") and file not in ("sitecustomize.py", "usercustomize.py")


def find_sources(library: Path) -> tuple[SourceFile, ...]:
    """The files of the corpus in name order. Raises: DataError if there are none."""
    documents = []
    for folder, folders, files in os.walk(library):
        # Installed packages may be many times larger than the library.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for path in (Path(folder, file) for file in files):
            name = path.relative_to(library).as_posix()
            if belongs(name) and path.is_file() and (status := path.stat()).st_size:
                documents.append(SourceFile(str(path), name, status.st_size, str(status.st_mtime_ns)))
    if not documents:
        raise DataError(
            f"`data.path=stdlib` needs the source files of the Python standard library, but {library} holds none; "
            "use a Python that has them, or set data.path to token files of your own"
        )
    return tuple(sorted(documents, key=lambda document: document.name))


def content_digest(documents: tuple[SourceFile, ...]) -> str:
    """Identifies the corpus by file names, sizes and bytes."""
    digest = xxhash.xxh3_128()
    for document in documents:
        text = Path(document.url).read_bytes()
        digest.update(f"{document.name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def prepare_stdlib(cache: CacheFolder, *, library: Path) -> tuple[TokenIndex, Path, CacheLease]:
    """The corpus in the cache: index, folder, and the lease that keeps it there. One process prepares while others wait."""
    documents = find_sources(library)
    name = f"stdlib-{sysconfig.get_python_version()}-{content_digest(documents)}"
    size_bytes = 2 * (sum(document.size_bytes for document in documents) + len(documents))
    lease = cache.lease(name, size_bytes=size_bytes, source="the standard library corpus")
    with lease.filling():
        # The name holds the text's digest; file times, which differ between installations, are no part of the plan.
        index, complete = prepare(documents, plan=name, store=open_store(str(lease.folder)), encoder=Encoder(ByteTokenizer()))
    if not complete:
        _logger.info("prepared the standard library corpus (%d tokens) in %s", index.num_tokens, lease.folder)
    return index, lease.folder, lease
