"""The corpus that every machine has: the source text of the Python standard library that runs the program."""

import logging
import os
import sysconfig
from pathlib import Path

import xxhash

from elastictrain.data.cache import CacheFolder, CacheLease
from elastictrain.data.index import TokenIndex
from elastictrain.data.prepare import Document, prepare
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.errors import DataError
from elastictrain.storage.opening import open_store

_logger = logging.getLogger(__name__)
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def library_folder() -> Path:
    """Where the standard library of this Python is; also in a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def belongs(name: str) -> bool:
    """Whether the file `name` (relative to the library's folder, with '/') is part of the corpus.

    Tests and installed packages are not, nor are the files that a distributor generates or adds, so that two builds of one
    Python version have the same corpus.
    """
    *folders, file = name.split("/")
    if not file.endswith(".py") or _LEFT_OUT.intersection(folders):
        return False
    return not file.startswith("_sysconfigdata") and file not in ("sitecustomize.py", "usercustomize.py")


def find_sources(library: Path) -> tuple[Document, ...]:
    """The files of the corpus in name order. Raises: DataError if there are none."""
    documents = []
    for folder, folders, files in os.walk(library):
        # Installed packages may be many times larger than the library.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for path in (Path(folder, file) for file in files):
            name = path.relative_to(library).as_posix()
            if belongs(name) and path.is_file() and (status := path.stat()).st_size:
                documents.append(Document(path, name, status.st_size, status.st_mtime_ns))
    if not documents:
        raise DataError(
            f"`data.path=stdlib` needs the source files of the Python standard library, but {library} holds none; "
            "use a Python that has them, or set data.path to token files of your own"
        )
    return tuple(sorted(documents, key=lambda document: document.name))


def content_digest(documents: tuple[Document, ...]) -> str:
    """Names the corpus by what it says: file names, sizes and bytes."""
    digest = xxhash.xxh3_128()
    for document in documents:
        text = document.path.read_bytes()
        digest.update(f"{document.name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def prepare_stdlib(cache: CacheFolder, *, library: Path) -> tuple[TokenIndex, Path, CacheLease]:
    """The corpus as token files in the cache: its index, its folder, and the lease that keeps it there.

    Safe to call from any number of processes at once: one prepares, the others wait and find it done.
    """
    documents = find_sources(library)
    name = f"stdlib-{sysconfig.get_python_version()}-{content_digest(documents)}"
    size_bytes = 2 * (sum(document.size_bytes for document in documents) + len(documents))
    lease = cache.lease(name, size_bytes=size_bytes, source="the standard library corpus")
    with lease.filling():
        # The name says what the text is; the files' times, which differ between installations, are no part of the plan.
        prepared = prepare(documents, plan=name, store=open_store(str(lease.folder)), tokenizer=ByteTokenizer())
    if not prepared.already_complete:
        _logger.info("prepared the standard library corpus (%d tokens) in %s", prepared.index.num_tokens, lease.folder)
    return prepared.index, lease.folder, lease
