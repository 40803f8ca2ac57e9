"""Pieces of source files, and the documents in a piece.

Where a piece ends depends on nothing but the file and where the piece begins, so a preparation that was killed goes on with the
same pieces. One process reads the pieces; several parse them and turn them into tokens.
"""

import gzip
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from elastictrain.data.sources import SourceFile, StoredFile, http_file, is_http, stat_source
from elastictrain.errors import DataError
from elastictrain.storage.local import local_path
from elastictrain.storage.opening import open_store

PIECE_BYTES = 2**20
_PIECE_ROWS = 256
_LONGEST_LINE_BYTES = 2**28
_READ_BYTES = 2**23


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one source file: bytes of text or of whole lines, or the values of a column."""

    source: int  # number of the file
    offset: int  # bytes before it in the (uncompressed) file, or rows
    data: bytes | tuple[object, ...]
    read_bytes: int  # of the file, up to the end of this piece
    last: bool  # of its file; rows are documents of their own


@dataclass(frozen=True, slots=True)
class Documents:
    """The texts in a piece. All but the first begin here, and all but the last end here."""

    texts: tuple[bytes, ...]
    begins: bool
    ends: bool


class RefusedTextError(Exception):
    """Line (or row) `row` of a piece, counted from 0, is not what it must be; `trouble` completes the sentence."""

    def __init__(self, row: int, trouble: str) -> None:
        super().__init__(row, trouble)
        self.row = row
        self.trouble = trouble


@contextmanager
def _opened(source: SourceFile) -> Iterator[BinaryIO]:
    if is_http(source.url):
        files, path = http_file(source.url)
        file = files.open(path, "rb", block_size=_READ_BYTES)
    elif local_path(source.url) is not None:
        try:
            file = Path(source.url).open("rb")  # noqa: SIM115  closed below
        except OSError as error:
            raise DataError(f"input {source.url} must be a readable file, but is not: {error.strerror}") from None
    else:
        folder, _, key = source.url.rpartition("/")
        file = io.BufferedReader(StoredFile(open_store(folder), key, size_bytes=source.size_bytes), _READ_BYTES)
    with file:
        yield cast(BinaryIO, file)


def pieces(sources: Sequence[SourceFile], *, kind: str, field: str, start: tuple[int, int] = (0, 0)) -> Iterator[Piece]:
    """The pieces of all files of one format in order, from the piece at `start` (file, offset) on.

    Raises: DataError if a file cannot be read, is of another format, or has changed.
    """
    for number in range(start[0], len(sources)):
        source = sources[number]
        begin = start[1] if number == start[0] else 0
        # A file may change while it is read, so it is compared at both ends.
        _refuse_change(source)
        with _opened(source) as file:
            if kind in ("text", "jsonl"):
                yield from _byte_pieces(file, source, number=number, start=begin, cut=cut if kind == "text" else cut_lines)
            else:
                yield from _row_pieces(file, source, number=number, kind=kind, field=field, start=begin)
        _refuse_change(source)


def _refuse_change(source: SourceFile) -> None:
    found = stat_source(source.url, name=source.name)
    if (found.size_bytes, found.stamp) != (source.size_bytes, source.stamp):
        raise DataError(f"input {source.url} changed while it was being read; prepare the data again when it stays as it is")


def _skip(file: BinaryIO, count: int) -> None:
    try:
        file.seek(count)
    except ValueError:  # a web server that sends files only whole
        while count and (data := file.read(min(count, _READ_BYTES))):
            count -= len(data)


def cut(data: bytes) -> int:
    """Where the piece that begins with `data` ends: after the last line break, or else between two characters of UTF-8.

    Long documents are encoded in pieces to bound the memory; a cut at a line break hardly changes the tokens.
    """
    if end := cut_lines(data):
        return end
    end = len(data) - 1
    while end > max(1, len(data) - 4) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def cut_lines(data: bytes) -> int:
    """Where the last line of `data` ends; 0 if none does."""
    return data.rfind(b"\n") + 1


def _byte_pieces(raw: BinaryIO, source: SourceFile, *, number: int, start: int, cut: Callable[[bytes], int]) -> Iterator[Piece]:
    file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if source.url.endswith(".gz") else raw
    offset, rest = start, b""
    try:
        _skip(file, start)
        while True:
            size = PIECE_BYTES
            while True:
                rest += file.read(max(0, size + 1 - len(rest)))
                last = len(rest) <= size
                end = len(rest) if last else cut(rest[:size])
                if end or last:
                    break
                size *= 2
                if size > _LONGEST_LINE_BYTES:
                    raise DataError(f"input {source.url} must have lines of at most {size // 2} bytes, but has a longer one")
            yield Piece(number, offset, rest[:end], source.size_bytes if last else raw.tell(), last)
            if last:
                return
            offset, rest = offset + end, rest[end:]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"input {source.url} must be a file that can be read to its end, but is not: {error}") from None


def _row_pieces(raw: BinaryIO, source: SourceFile, *, number: int, kind: str, field: str, start: int) -> Iterator[Piece]:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"reading {source.url} needs the package pyarrow, which is not installed; run: pip install pyarrow"
        ) from None
    first = 0
    try:
        for names, count, read in (_row_groups if kind == "parquet" else _batches)(raw):
            if field not in names:
                raise DataError(f"input {source.url} must have the column {field!r}, but has {', '.join(names)}; pass --field")
            column: Any = read(field) if first + count > start else ()
            if len(column) and str(column.type) not in ("string", "large_string", "string_view"):
                raise DataError(f"input {source.url} must have texts in the column {field!r}, but has {column.type} there")
            for begin in range(0, len(column), _PIECE_ROWS):
                if first + begin >= start:
                    values = tuple(column.slice(begin, _PIECE_ROWS).to_pylist())
                    # Where the reader is: columns that are left out are passed over at the end.
                    yield Piece(number, first + begin, values, min(raw.tell(), source.size_bytes), last=True)
            first += count
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"input {source.url} must be a file of the format {kind}, but cannot be read as one: {error}") from None


_Rows = tuple[Sequence[str], int, Callable[[str], Any]]  # names of the columns, rows, and what reads a column of them


def _row_groups(raw: BinaryIO) -> Iterator[_Rows]:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(raw)

    def read(field: str, group: int) -> Any:
        return table.read_row_group(group, columns=[field]).column(field)

    for group in range(table.num_row_groups):
        yield table.schema_arrow.names, table.metadata.row_group(group).num_rows, partial(read, group=group)


def _batches(raw: BinaryIO) -> Iterator[_Rows]:
    from pyarrow.ipc import open_stream

    for batch in open_stream(raw):
        yield batch.schema.names, batch.num_rows, batch.column


def documents(piece: Piece, *, kind: str, field: str) -> Documents:
    """The texts in `piece`, each valid UTF-8; rows without text are left out. Raises: RefusedTextError."""
    if isinstance(piece.data, tuple):
        texts = [_encoded(text, row=row, field=field) for row, text in enumerate(piece.data)]
        return Documents(tuple(filter(None, texts)), begins=True, ends=True)
    _check_utf8(piece.data)
    if kind == "text":
        begins = piece.offset == 0
        return Documents((piece.data,) if piece.data or not begins else (), begins=begins, ends=piece.last)
    lines = enumerate(piece.data.split(b"\n"))
    texts = [_encoded(_field_of(line, row=row, field=field), row=row, field=field) for row, line in lines if line.strip()]
    return Documents(tuple(filter(None, texts)), begins=True, ends=True)


def _field_of(line: bytes, *, row: int, field: str) -> object:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusedTextError(row, f"must be one JSON object, but is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise RefusedTextError(row, f"must be one JSON object, but is {type(value).__name__}")
    if field not in value:
        keys = ", ".join(map(repr, list(value)[:8])) or "no key"
        raise RefusedTextError(row, f"must have the field {field!r}, but has {keys}; pass --field")
    return value[field]


def _encoded(text: object, *, row: int, field: str) -> bytes:
    if not isinstance(text, str):
        found = "null" if text is None else f"a value of type {type(text).__name__}"
        raise RefusedTextError(row, f"must have a text as {field!r}, but has {found}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RefusedTextError(row, f"must have whole characters in {field!r}, but has half of a surrogate pair") from None


def _check_utf8(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)
        raise RefusedTextError(line, f"must be UTF-8, but is not: {error.reason} (byte 0x{data[error.start]:02x})") from None


def refusal(error: RefusedTextError, *, offset: int, source: SourceFile, kind: str) -> DataError:
    """The error for a person: the file, and the line or row in it, counted from 1. `offset` of the piece."""
    if kind in ("parquet", "arrow"):
        return DataError(f"input {source.url}, row {offset + error.row + 1} {error.trouble}")
    before, left = 0, offset
    with _opened(source) as raw:
        file = gzip.GzipFile(fileobj=raw) if source.url.endswith(".gz") else raw
        while left and (data := file.read(min(left, _READ_BYTES))):
            before += data.count(b"\n")
            left -= len(data)
    return DataError(f"input {source.url}, line {before + error.row + 1} {error.trouble}")
