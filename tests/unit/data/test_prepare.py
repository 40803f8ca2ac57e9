from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import encode_record
from elastictrain.data.index import decode_index
from elastictrain.data.prepare import PlanProgress, Position, cut, discover, prepare
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.errors import DataError
from tests.unit.examples import examples

TEXTS = {"a.txt": b"first\nsecond\n", "b/c.txt": "häl\u20aclo".encode(), "b/d.txt": b"", "e.txt": b"x" * 50}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    return tmp_path / "in"


def run(store: Any, folder: Path, *, shard_tokens: int = 16, plan: str = "plan") -> Any:
    return prepare(
        discover([str(folder)], patterns=["*.txt"]),
        plan=plan,
        store=store,
        tokenizer=ByteTokenizer(),
        shard_tokens=shard_tokens,
    )


def test_documents_are_separated_and_cut_into_shards(memory_store: Any, folder: Path) -> None:
    index, _ = run(memory_store, folder)
    data = b"".join(memory_store.objects[shard.file] for shard in index.shards)
    tokens = [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]
    assert tokens == [*TEXTS["a.txt"], 256, *TEXTS["b/c.txt"], 256, *TEXTS["e.txt"], 256]
    assert [shard.num_tokens for shard in index.shards] == [16, 16, 16, 16, 11]
    assert index.num_documents == 3
    assert decode_index(memory_store.objects["index.json"], url="x") == index


def test_interrupted_after_every_write_and_continued(memory_store: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small pieces, so that shards end within pieces and pieces within documents.
    monkeypatch.setattr("elastictrain.data.prepare._PIECE_BYTES", 7)
    whole = type(memory_store)()
    run(whole, folder, shard_tokens=9)
    interruptions = 0
    for writes in range(1, 60):
        store = type(memory_store)()
        store.writes_left = writes
        try:
            run(store, folder, shard_tokens=9)
        except KeyboardInterrupt:
            interruptions += 1
            finished = sum(key.endswith(".bin") for key in store.objects)
            store.writes_left = -1
            store.streams = 0
            total = len(run(store, folder, shard_tokens=9)[0].shards)
            assert total - finished <= store.streams <= total - finished + 1
        assert store.objects == whole.objects
    assert interruptions > 15


def test_a_finished_folder_is_left_alone(memory_store: Any, folder: Path) -> None:
    index, _ = run(memory_store, folder)
    memory_store.writes_left = 0
    assert run(memory_store, folder) == (index, True)


@pytest.mark.parametrize("finished", [True, False])
def test_other_inputs_are_refused(memory_store: Any, folder: Path, finished: bool) -> None:
    run(memory_store, folder)
    if not finished:
        memory_store.delete("index.json")
    before = dict(memory_store.objects)
    with pytest.raises(DataError, match=r"memory://tokens.*--out"):
        run(memory_store, folder, plan="other")
    assert memory_store.objects == before


def test_of_two_that_start_at_once_one_wins(memory_store: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(key: str, data: bytes) -> None:
        monkeypatch.undo()
        memory_store.create(key, encode_record(PlanProgress("other", (), Position(0, 0, 0))))
        memory_store.create(key, data)

    monkeypatch.setattr(memory_store, "create", create)
    with pytest.raises(DataError, match="memory://tokens"):
        run(memory_store, folder)
    assert set(memory_store.objects) == {"prepare.json"}


def test_a_file_that_changes_meanwhile_is_refused(memory_store: Any, folder: Path) -> None:
    documents = discover([str(folder)], patterns=["*.txt"])
    (folder / "e.txt").write_bytes(b"shorter")
    with pytest.raises(DataError, match=r"e\.txt changed"):
        prepare(documents, plan="plan", store=memory_store, tokenizer=ByteTokenizer(), shard_tokens=100)
    assert "index.json" not in memory_store.objects


def test_discover_keeps_order_and_drops_repetitions(folder: Path) -> None:
    found = discover([str(folder / "e.txt"), str(folder), str(folder / "b" / "*.txt")], patterns=["*.txt"])
    assert [document.name for document in found] == ["e.txt", "a.txt", "b/c.txt"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("nothing-here", "nothing-here"),
        ("nothing-*", r"nothing-\*"),
        ("s3://bucket/text", "s3://bucket/text"),
        (".", r"\*\.none"),
        ("b/d.txt", r"b/d\.txt"),
    ],
)
def test_inputs_that_cannot_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, named: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=named):
        discover([given], patterns=["*.none"])


@settings(max_examples=examples(60))
@given(text=st.text(min_size=1, max_size=30), size=st.integers(5, 12))
def test_pieces_join_to_the_text_and_never_split_a_character(text: str, size: int) -> None:
    data, offset, pieces = text.encode(), 0, []
    while offset < len(data):
        piece = data[offset : offset + size]
        piece = piece[: cut(piece, final=offset + len(piece) >= len(data))]
        assert piece
        pieces.append(piece)
        offset += len(piece)
    assert b"".join(pieces) == data
    assert "".join(piece.decode() for piece in pieces) == text


@given(data=st.binary(min_size=1, max_size=20))
def test_a_piece_is_never_empty(data: bytes) -> None:
    assert 1 <= cut(data, final=False) <= len(data) or len(data) == 1


@pytest.mark.parametrize("data", [b'{"plan": 1}', b"{", b""])
def test_damaged_progress_is_refused(memory_store: Any, folder: Path, data: bytes) -> None:
    memory_store.write("prepare.json", data)
    with pytest.raises(DataError, match=r"prepare\.json"):
        run(memory_store, folder)


def test_an_index_without_progress_is_somebody_elses(memory_store: Any, folder: Path) -> None:
    run(memory_store, folder)
    memory_store.delete("prepare.json")
    with pytest.raises(DataError, match="memory://tokens"):
        run(memory_store, folder)
