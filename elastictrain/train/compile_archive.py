"""The archive of compiled code in a run's folder: its name, its files, how it is packed, sealed and checked. Free of torch.

    <run.dir>/compile_cache/KEY-GENERATION-CONTENT

An archive is a line of JSON (`sha256` of what follows, `signature`) and a zlib stream: a line of JSON that places each file,
and the bytes of the files, equal ones once. It holds code: whoever can write one can run code as the user who loads it.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

from elastictrain.bounded_json import DOCUMENT, RECORD, MalformedJsonError, encode_record, parse_record
from elastictrain.checkpoint.signing import SigningKey

FOLDER = "compile_cache"
MOST_BYTES = 256 << 20  # of an archive
MOST_UNPACKED_BYTES = 1 << 30
KEPT_KEYS = 3
LOCKS = "locks"  # torch's own, a folder with a file for each object that g++ makes

_NAME = re.compile(rf"{FOLDER}/([0-9a-f]{{24}})-([0-9]{{6,18}})-([0-9a-f]{{16}})")
_FILE = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,200}/){0,8}[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,200}")
_UNFINISHED = (".lock", ".tmp")
_PURPOSE = "elastictrain compiled code "
_PLACEHOLDER = b"{elastictrain-compile-cache}"  # for the host's folder, whose path Triton writes into its group files
_ELF, _ELF_HEADER_BYTES = b"\x7fELF\x02\x01", 64


class ArchiveRefusedError(ValueError):
    """An archive that must not be used; the message completes a sentence that begins with its URL."""

    def __init__(self, reason: Literal["damaged", "signature", "size", "writable by others"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ArchiveName:
    key: str  # of `compile_key.cache_key`
    number: int  # of the generation that wrote it
    content: str  # of `content_of`

    def __str__(self) -> str:
        return f"{FOLDER}/{self.key}-{self.number:06d}-{self.content}"


@dataclass(frozen=True, slots=True)
class _Header:
    sha256: str
    signature: str


@dataclass(frozen=True, slots=True)
class _Index:
    files: list[tuple[str, int, int]]  # path, offset, size in bytes


def parse_name(key: str) -> ArchiveName | None:
    """The name in an object's key; None if it is no archive's."""
    found = _NAME.fullmatch(key)
    return None if found is None else ArchiveName(found[1], int(found[2]), found[3])


def newest(names: Iterable[ArchiveName], *, key: str) -> ArchiveName | None:
    """The archive of `key` that the latest generation wrote."""
    return max((name for name in names if name.key == key), key=_age, default=None)


def superfluous(names: Iterable[ArchiveName]) -> list[ArchiveName]:
    """What to remove: all but the newest archive of each of the three keys that were written last."""
    ordered = sorted(names, key=_age, reverse=True)
    newest_of: dict[str, ArchiveName] = {}
    for name in ordered:
        newest_of.setdefault(name.key, name)
    kept = list(newest_of.values())[:KEPT_KEYS]
    return [name for name in ordered if name not in kept]


def _age(name: ArchiveName) -> tuple[int, str]:
    return name.number, name.content


def files_in(folder: str) -> dict[str, int]:
    """Sizes in bytes of the cache's files below `folder`, by path; none that is unfinished, a lock, or a link."""
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != LOCKS and not name.startswith("tmp.")]
        for name in names:
            path = os.path.relpath(f"{parent}/{name}", folder)
            if name.endswith(_UNFINISHED) or _FILE.fullmatch(path) is None:
                continue
            with suppress(FileNotFoundError):
                status = os.lstat(f"{folder}/{path}")
                if stat.S_ISREG(status.st_mode) and status.st_size:
                    found[path] = status.st_size
    return found


def content_of(files: Mapping[str, int]) -> str:
    """16 hex digits that are equal for equal paths; torch names files by their content."""
    return hashlib.sha256("\n".join(sorted(files)).encode()).hexdigest()[:16]


def pack(folder: str, files: Iterable[str]) -> bytes:
    """The body of an archive. Raises: ArchiveRefusedError if it would be too large; OSError."""
    places: dict[bytes, int] = {}
    index: list[tuple[str, int, int]] = []
    pieces: list[bytes] = []
    size = total = 0
    for path in sorted(files):
        with open(f"{folder}/{path}", "rb") as file:  # noqa: PTH123
            data = file.read(MOST_UNPACKED_BYTES + 1)
        if path.endswith(".so") and not is_whole_object(data[:_ELF_HEADER_BYTES], size=len(data)):
            continue
        if path.endswith(".json"):
            data = data.replace(os.fsencode(folder), _PLACEHOLDER)
        digest = hashlib.sha256(data).digest()
        if digest not in places:
            places[digest] = size
            pieces.append(data)
            size += len(data)
        total += len(data)
        if total > MOST_UNPACKED_BYTES:
            raise ArchiveRefusedError("size", f"would hold more than {MOST_UNPACKED_BYTES} bytes")
        index.append((path, places[digest], len(data)))
    body = zlib.compress(encode_record(_Index(index)) + b"\n" + b"".join(pieces), 1)
    if len(body) > MOST_BYTES - RECORD.max_bytes:
        raise ArchiveRefusedError("size", f"would have more than {MOST_BYTES} bytes")
    return body


def unpack(folder: str, body: bytes) -> int:
    """Add the files of an archive to `folder`, each atomically, none that is there already; returns how many were added.

    Raises: ArchiveRefusedError, before anything is written; OSError.
    """
    files = _contents(body)
    unfinished = tempfile.mkdtemp(prefix=".unpacking-", dir=folder)
    added = 0
    try:
        for number, (path, data) in enumerate(files.items()):
            target = f"{folder}/{path}"
            if path.endswith(".json"):
                data = data.replace(_PLACEHOLDER, os.fsencode(folder))  # noqa: PLW2901
            if os.path.lexists(target):
                continue
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
            # Not written in place: torch may read the folder meanwhile.
            descriptor = os.open(f"{unfinished}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.rename(f"{unfinished}/{number}", target)  # noqa: PTH104
            added += 1
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return added


def seal(name: ArchiveName, body: bytes, *, signing: SigningKey | None) -> bytes:
    """The archive: `body` behind its digest, signed if there is a key. The signature covers the name."""
    digest = hashlib.sha256(body).hexdigest()
    signature = "" if signing is None else signing.sign(digest.encode(), purpose=f"{_PURPOSE}{name}")
    return encode_record(_Header(digest, signature)) + b"\n" + body


def unseal(name: ArchiveName, data: bytes, *, signing: SigningKey | None) -> bytes:
    """The body of an archive that is whole, and signed with `signing` if that is given. Raises: ArchiveRefusedError."""
    if len(data) > MOST_BYTES:
        raise ArchiveRefusedError("size", f"must have at most {MOST_BYTES} bytes, but has more")
    line, _, body = data.partition(b"\n")
    try:
        header = parse_record(line, _Header)
    except MalformedJsonError as error:
        raise ArchiveRefusedError("damaged", str(error)) from error
    purpose = f"{_PURPOSE}{name}"
    if signing is not None and not signing.is_signed(header.sha256.encode(), header.signature, purpose=purpose):
        raise ArchiveRefusedError("signature", f"must be signed with {signing.name}, but is not")
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise ArchiveRefusedError("damaged", "must have the digest in its first line, but has another")
    return body


def is_whole_object(header: bytes, *, size: int) -> bool:
    """Whether a 64-bit shared object of `size` bytes is not cut short: a linker writes the table of sections last. `header` is
    its first 64 bytes. Pure."""
    if len(header) < _ELF_HEADER_BYTES or not header.startswith(_ELF):
        return False
    sections = int.from_bytes(header[40:48], "little")
    each, count = (int.from_bytes(header[at : at + 2], "little") for at in (58, 60))
    return sections > 0 and sections + each * count <= size


def remove_torn_objects(folder: str) -> list[str]:
    """Remove the shared objects that a killed linker has left, and return their paths: torch takes them for whole, and every
    process that loads one fails. One that is being made stays. Raises: OSError."""
    removed = []
    for path, size in files_in(folder).items():
        if not path.endswith(".so"):
            continue
        with open(f"{folder}/{path}", "rb") as file:  # noqa: PTH123
            if is_whole_object(file.read(_ELF_HEADER_BYTES), size=size):
                continue
        lock = f"{folder}/{LOCKS}/{os.path.basename(path).partition('.')[0]}.lock"  # noqa: PTH119
        with suppress(BlockingIOError), ExitStack() as stack:
            with suppress(FileNotFoundError):
                fcntl.flock(stack.enter_context(open(lock, "rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: PTH123
            os.unlink(f"{folder}/{path}")  # noqa: PTH108
            removed.append(path)
    return removed


def _contents(body: bytes) -> dict[str, bytes]:
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(body, MOST_UNPACKED_BYTES)
        if not decompressor.eof:
            raise ArchiveRefusedError("size", f"must hold a whole stream of at most {MOST_UNPACKED_BYTES} bytes, but does not")
        line, _, rest = data.partition(b"\n")
        index = parse_record(line, _Index, limits=DOCUMENT)
    except (zlib.error, MalformedJsonError) as error:
        raise ArchiveRefusedError("damaged", str(error)) from error
    if sum(size for _, _, size in index.files) > MOST_UNPACKED_BYTES:
        raise ArchiveRefusedError("size", f"must hold files of at most {MOST_UNPACKED_BYTES} bytes, but they have more")
    for path, offset, size in index.files:
        if _FILE.fullmatch(path) is None or path.endswith(_UNFINISHED) or not 0 <= offset <= offset + size <= len(rest):
            raise ArchiveRefusedError("damaged", "must place files within its folder and within its bytes, but does not")
    return {path: rest[offset : offset + size] for path, offset, size in index.files}
