import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.data import formats
from elastictrain.data.formats import RefusedTextError, cut, documents, pieces, refusal
from elastictrain.data.sources import SourceFile, discover
from elastictrain.errors import DataError
from elastictrain.storage.opening import open_store
from tests.unit.examples import examples


def texts(sources: tuple[SourceFile, ...], *, kind: str, field: str = "text", start: tuple[int, int] = (0, 0)) -> list[str]:
    """The texts of all pieces from `start` on, or the message of the first refusal."""
    found = []
    for piece in pieces(sources, kind=kind, field=field, start=start):
        try:
            found += [text.decode() for text in documents(piece, kind=kind, field=field).texts]
        except RefusedTextError as error:
            raise refusal(error, offset=piece.offset, source=sources[piece.source], kind=kind) from None
    return found


@settings(max_examples=examples(60))
@given(text=st.text(min_size=1, max_size=30), size=st.integers(5, 12))
def test_pieces_join_to_the_text_and_never_split_a_character(text: str, size: int) -> None:
    data, offset, found = text.encode(), 0, []
    while offset < len(data):
        piece = data[offset : offset + size]
        piece = piece if offset + len(piece) >= len(data) else piece[: cut(piece)]
        assert piece
        found.append(piece)
        offset += len(piece)
    assert b"".join(found) == data
    assert "".join(piece.decode() for piece in found) == text


@pytest.fixture
def table(tmp_path: Path) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({"text": [f"row {number}" for number in range(700)], "id": list(range(700))})


def write(table: Any, path: Path, *, kind: str, rows: int = 300) -> tuple[SourceFile, ...]:
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return discover([str(path)])


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "text", "jsonl.gz"])
def test_from_any_piece_on_there_are_the_same_pieces(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(formats, "PIECE_BYTES", 500)
    path = tmp_path / f"data.{kind}"
    rows = table.column("text").to_pylist()
    if kind in ("parquet", "arrow"):
        sources = write(table, path, kind=kind)
    else:
        lines = "\n".join(rows if kind == "text" else [json.dumps({"text": row}) for row in rows]).encode()
        path.write_bytes(gzip.compress(lines) if kind.endswith(".gz") else lines)
        sources = (*discover([str(path)]), *discover([str(path)]))
    plain = kind.removesuffix(".gz")
    whole = list(pieces(sources, kind=plain, field="text"))
    assert len(whole) > 4
    assert [piece.read_bytes for piece in whole][-1] <= sources[0].size_bytes
    for number, piece in enumerate(whole):
        assert list(pieces(sources, kind=plain, field="text", start=(piece.source, piece.offset))) == whole[number:]
    found = texts(sources, kind=plain)
    assert found == rows * len(sources) if plain != "text" else "".join(found) == "\n".join(rows) * 2


def test_a_remote_table(table: Any, tmp_path: Path) -> None:
    write(table, tmp_path / "a.parquet", kind="parquet")
    open_store("memory://formats").write("a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert texts(discover(["memory://formats/a.parquet"]), kind="parquet") == table.column("text").to_pylist()


LINE = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    ("lines", "number", "named"),
    [
        (b'{"body": "x"}', 3, "'body'"),
        (b"{}", 3, "no key"),
        (b"[1]", 3, "list"),
        (b'"text"', 3, "str"),
        (b'{"text": 5}', 3, "int"),
        (b'{"text": null}', 3, "null"),
        (b'{"text": "x"', 3, "JSON"),
        (b'\n\n{"text": "\xff"}', 5, "UTF-8"),
        (b'{"text": "\\ud800"}', 3, ""),
        (b"[" * 100_000, 3, "JSON"),
        (b"plain text", 3, "JSON"),
    ],
)
def test_a_line_that_is_refused_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: bytes, number: int, named: str
) -> None:
    monkeypatch.setattr(formats, "PIECE_BYTES", 20)
    (tmp_path / "a.jsonl").write_bytes(LINE * 2 + lines + b"\n" + LINE)
    with pytest.raises(DataError, match=rf"a\.jsonl, line {number} must .*{named}") as caught:
        texts(discover([str(tmp_path / "a.jsonl")]), kind="jsonl")
    assert len(str(caught.value)) < 400


def test_text_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_BYTES", 20)
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n" * 8 + b"h\xe4lt\n")
    with pytest.raises(DataError, match=r"a\.txt, line 17 must be UTF-8"):
        texts(discover([str(tmp_path / "a.txt")]), kind="text")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_that_are_refused(table: Any, tmp_path: Path, kind: str) -> None:
    import pyarrow

    path = tmp_path / f"a.{kind}"
    sources = write(table, path, kind=kind)
    with pytest.raises(DataError, match=rf"a\.{kind} must have the column 'body', but has text, id"):
        texts(sources, kind=kind, field="body")
    with pytest.raises(DataError, match=rf"a\.{kind} must have texts in the column 'id', but has int64"):
        texts(sources, kind=kind, field="id")
    holed = pyarrow.table({"text": ["a"] * 300 + [None]})
    with pytest.raises(DataError, match=rf"a\.{kind}, row 301 must have a text as 'text', but has null"):
        texts(write(holed, path, kind=kind), kind=kind)
    path.write_bytes(b"not a table at all")
    with pytest.raises(DataError, match=rf"a\.{kind} must be"):
        texts(discover([str(path)]), kind=kind)


@pytest.mark.parametrize("damage", ["short", "other"])
def test_a_compressed_file_that_is_damaged(tmp_path: Path, damage: str) -> None:
    data = gzip.compress(LINE * 100)
    (tmp_path / "a.jsonl.gz").write_bytes(data[:-9] if damage == "short" else b"plain")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        texts(discover([str(tmp_path / "a.jsonl.gz")]), kind="jsonl")


def test_without_pyarrow_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match="pip install pyarrow"):
        texts(discover([str(tmp_path / "a.parquet")]), kind="parquet")
