"""Which files `prepare` reads: files, folders and patterns, on a local disk or at any URL, all of one format."""

import glob
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from elastictrain.bounded_json import parse_json
from elastictrain.data.hub import hub_snapshot
from elastictrain.errors import DataError, ObjectNotFoundError
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.local import local_path
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store

FORMATS = ("text", "jsonl", "parquet", "arrow")
PATTERNS = ("*.txt", "*.jsonl", "*.ndjson", "*.parquet", "*.txt.gz", "*.jsonl.gz")  # what is taken from a folder
_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# Source: the names by which Hugging Face datasets finds the splits of a repository without a configuration.
_SPLIT = re.compile(r"(?:^|[-._ /])(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?=[-._ /]|$)")
_SPLIT_OF = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"} | dict.fromkeys(
    ("testing", "eval", "evaluation"), "test"
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    url: str  # path or URL
    name: str  # relative to the input that it was found by
    size_bytes: int  # 0 where a server does not say
    stamp: str  # another one when the file has changed


class StoredFile(io.RawIOBase):
    """An object as a file that is read and sought in."""

    def __init__(self, store: Store, key: str, *, size_bytes: int) -> None:
        self._store, self._key = store, key
        self._size_bytes, self._at = size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size_bytes - self._at)]
        count = self._store.read_into(self._key, view, start=self._at) if len(view) else 0
        self._at += count
        return count


def is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def http_file(url: str) -> tuple[Any, str]:
    """fsspec's file system for `url`, and the path in it. Raises: DataError without the package for it."""
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError:
        raise DataError(f"input {url} needs the package aiohttp, which is not installed; run: pip install aiohttp") from None
    return files, str(path)


def stat_source(url: str, *, name: str) -> SourceFile:
    """One file. Raises: DataError if it does not exist or cannot be read; StorageError."""
    if is_http(url):
        files, path = http_file(url)
        try:
            found = files.info(path)
        # The client raises its own, aiohttp's and the system's errors.
        except Exception as error:  # noqa: BLE001
            raise DataError(f"input {url} must be a file that can be read, but is not: {error or repr(error)}") from None
        stamp = next((str(found[key]) for key in ("ETag", "etag", "Last-Modified") if found.get(key)), "")
        return SourceFile(url, name, int(found.get("size") or 0), stamp)
    if (local := local_path(url)) is None:
        folder, _, key = url.rpartition("/")
        info = open_store(folder).stat(key)
        return SourceFile(url, name, info.size_bytes, str(info.modified))
    try:
        status = Path(local).stat()
    except OSError as error:
        raise DataError(f"input {url} must be a readable file, but is not: {error.strerror}") from None
    return SourceFile(local, name, status.st_size, str(status.st_mtime_ns))


def discover(inputs: Sequence[str], *, patterns: Sequence[str] = (), split: str | None = None) -> tuple[SourceFile, ...]:
    """The files that `inputs` name, in the given order, those of each folder and pattern in name order.

    `patterns` choose files of folders; `split` chooses one part of a data set that has several. Empty files and repetitions are
    left out. Raises: DataError naming the input that is missing, matches nothing or has several splits; StorageError.
    """
    found: dict[str, SourceFile] = {}
    for given in inputs:
        if is_http(given):
            source = stat_source(given, name=given)
            found.setdefault(given, source)
            continue
        expand = _expand_url if local_path(given) is None else _expand_path
        for url, name in expand(given, patterns=patterns, split=split):
            source = stat_source(url, name=name)
            if source.size_bytes:
                found.setdefault(str(Path(url).resolve()) if local_path(url) is not None else url, source)
    if not found:
        raise DataError(f"the inputs must hold at least one byte of text, but {', '.join(inputs)} hold none")
    return tuple(found.values())


def format_of(sources: Sequence[SourceFile], *, given: str = "auto") -> str:
    """The one format of all files: `given`, or that of their suffixes. Raises: DataError naming the files that do not fit."""
    if given != "auto":
        return given
    formats: dict[str, str] = {}
    for source in sources:
        name = PurePosixPath(source.url.partition("?")[0] if is_http(source.url) else source.url)
        plain = name.with_suffix("") if name.suffix == ".gz" else name
        found = _FORMAT_OF_SUFFIX.get(plain.suffix.lower())
        if found is None or (name.suffix == ".gz" and found not in ("text", "jsonl")):
            known = ", ".join(_FORMAT_OF_SUFFIX)
            raise DataError(
                f"input {source.url} must end in one of {known} (or .txt.gz, .jsonl.gz), but does not; say what it is with "
                f"--format {'|'.join(FORMATS)}"
            )
        formats.setdefault(found, source.url)
    if len(formats) > 1:
        both = " and ".join(f"{url} ({found})" for found, url in formats.items())
        raise DataError(f"the inputs must have one format, but there are {both}; prepare each in a folder of its own")
    return next(iter(formats))


def choose_files(
    names: Sequence[str], *, given: str, patterns: Sequence[str], split: str | None, read: Callable[[str], bytes]
) -> list[str]:
    """Which of the files `names` of the folder `given` are read; `read` reads a file of it. Raises: DataError."""
    if "dataset_dict.json" in names:
        splits = _json(read("dataset_dict.json"), "splits", url=f"{given}/dataset_dict.json")
        split = splits[0] if split is None and len(splits) == 1 else split
        if split not in splits or f"{split}/state.json" not in names:
            raise DataError(_several(given, splits, split=split))
        return [f"{split}/{name}" for name in _arrow_files(read(f"{split}/state.json"), url=f"{given}/{split}/state.json")]
    if "state.json" in names and "dataset_info.json" in names:
        return _arrow_files(read("state.json"), url=f"{given}/state.json")
    wanted = tuple(patterns) or PATTERNS
    chosen = sorted(name for name in names if any(PurePosixPath(name).match(pattern) for pattern in wanted))
    if not chosen:
        raise DataError(f"input {given} must hold files that match {' or '.join(wanted)}, but holds none; pass --pattern")
    tables = [name for name in chosen if name.removesuffix(".gz").endswith((".parquet", ".jsonl", ".ndjson"))]
    splits = sorted({one for name in tables if (one := split_of(name))})
    if split is None and len(splits) < 2:
        return chosen
    kept = [name for name in chosen if split_of(name) == split or name.startswith(f"{split}-")]
    if not kept:
        raise DataError(_several(given, splits, split=split))
    return kept


def split_of(name: str) -> str:
    """The split that the name of a file or of its folder tells, as `train`; '' if it tells none."""
    found = _SPLIT.search(name.lower())
    return _SPLIT_OF.get(found[1], found[1]) if found else ""


def _several(given: str, splits: Sequence[str], *, split: str | None) -> str:
    wanted = f"have the split {split}" if split is not None else "be one split"
    return f"input {given} must {wanted}, but has {', '.join(splits) or 'none'}; pass --split with one of them"


def _json(data: bytes, key: str, *, url: str) -> list[Any]:
    try:
        value = parse_json(data)[key]
    except (ValueError, TypeError, KeyError):
        value = None
    if not isinstance(value, list):
        raise DataError(f"{url} must be the JSON that Hugging Face datasets writes, with a list of {key}, but is not")
    return value


def _arrow_files(data: bytes, *, url: str) -> list[str]:
    files = [one.get("filename") if isinstance(one, dict) else None for one in _json(data, "_data_files", url=url)]
    # A name from the file must not lead out of its folder.
    if not all(isinstance(file, str) and re.fullmatch(r"[^/]+\.arrow", file) for file in files):
        raise DataError(f"{url} must name arrow files of its folder in `_data_files`, but names {files}")
    return [str(file) for file in files]


def _expand_path(given: str, *, patterns: Sequence[str], split: str | None) -> Iterator[tuple[str, str]]:
    path = Path(local_path(given) or given).expanduser()
    if path.is_file():
        yield str(path), path.name
    elif path.is_dir():
        path = hub_snapshot(path)
        names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        read = lambda name: (path / name).read_bytes()  # noqa: E731
        for name in choose_files(names, given=given, patterns=patterns, split=split, read=read):
            yield str(path / name), name
    else:
        # Path.glob accepts no absolute pattern.
        matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())  # noqa: PTH207
        if not matches:
            raise DataError(
                f"input {given} must be a file, a folder or a pattern that matches files, but there is nothing of that name"
            )
        for match in matches:
            yield match, match


def _expand_url(given: str, *, patterns: Sequence[str], split: str | None) -> Iterator[tuple[str, str]]:
    from fsspec.utils import glob_translate

    protocol, _, rest = given.rstrip("/").partition("://")
    parts = rest.split("/")
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    folder = f"{protocol}://{'/'.join(parts[:fixed])}"
    if fixed == len(parts) and fixed > 1:
        above, _, key = folder.rpartition("/")
        try:
            open_store(above).stat(key)
        except ObjectNotFoundError:
            pass
        else:
            yield folder, key
            return
    store = open_store(folder)
    names = [info.key for info in store.list()]
    if not names:
        raise DataError(f"input {given} must be a file, a folder or a pattern that matches files, but there is nothing there")
    if fixed == len(parts):
        read = lambda name: read_bounded(store, name)  # noqa: E731
        chosen = choose_files(names, given=given, patterns=patterns, split=split, read=read)
    else:
        matching = re.compile(glob_translate("/".join(parts[fixed:])))
        chosen = [name for name in names if matching.match(name)]
        if not chosen:
            raise DataError(f"input {given} must be a pattern that matches files, but matches none of the {len(names)} there")
    for name in chosen:
        yield f"{folder}/{name}", name
