import json
from pathlib import Path
from typing import Any

import pytest

from elastictrain.bounded_json import encode_record
from elastictrain.data.encoding import Encoder
from elastictrain.data.index import decode_index
from elastictrain.data.prepare import PlanProgress, Position, prepare
from elastictrain.data.sources import discover
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.errors import DataError

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
        encoder=Encoder(ByteTokenizer()),
        shard_tokens=shard_tokens,
    )


def test_documents_are_separated_and_cut_into_shards(memory_store: Any, folder: Path) -> None:
    index, _ = run(memory_store, folder)
    data = b"".join(memory_store.objects[shard.file] for shard in index.shards)
    tokens = [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]
    assert tokens == [*TEXTS["a.txt"], 256, *TEXTS["b/c.txt"], 256, *TEXTS["e.txt"], 256]
    assert [shard.num_tokens for shard in index.shards] == [16, 16, 16, 16, 11]
    assert index.num_documents == 3
    starts = b"".join(memory_store.objects[one.file] for one in index.documents)
    assert [int.from_bytes(starts[i : i + 8], "little") for i in range(0, len(starts), 8)] == [0, 14, 24]
    assert [one.num_documents for one in index.documents] == [2, 1, 0, 0, 0]
    assert decode_index(memory_store.objects["index.json"], url="x") == index


def test_interrupted_after_every_write_and_continued(memory_store: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small pieces, so that shards end within pieces and pieces within documents.
    monkeypatch.setattr("elastictrain.data.formats.PIECE_BYTES", 7)
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
            finished = sum(key.startswith("tokens-") for key in store.objects)
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
        prepare(documents, plan="plan", store=memory_store, encoder=Encoder(ByteTokenizer()), shard_tokens=100)
    assert memory_store.objects == {}


def test_discover_keeps_order_and_drops_repetitions(folder: Path) -> None:
    found = discover([str(folder / "e.txt"), str(folder), str(folder / "b" / "*.txt")], patterns=["*.txt"])
    assert [document.name for document in found] == ["e.txt", "a.txt", "b/c.txt"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("nothing-here", "nothing-here"),
        ("nothing-*", r"nothing-\*"),
        ("memory://nothing/text", "memory://nothing/text"),
        (".", r"\*\.none"),
        ("b/d.txt", r"b/d\.txt"),
    ],
)
def test_inputs_that_cannot_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, named: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=named):
        discover([given], patterns=["*.none"])


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


def test_a_folder_of_an_older_release_is_read(memory_store: Any, folder: Path) -> None:
    index, _ = run(memory_store, folder)
    record = json.loads(memory_store.objects["index.json"])
    del record["documents"]
    old = decode_index(json.dumps(record).encode(), url="x")
    assert (old.digest, old.shards, old.documents) == (index.digest, index.shards, ())


def test_lines_and_their_pieces(memory_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"id": number, "text": "wört" * number}) for number in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:3], "", *lines[3:]]))
    encoder = Encoder(ByteTokenizer(), kind="jsonl", field="text")
    sources = discover([str(tmp_path / "a.jsonl")])
    whole, parts = memory_store, type(memory_store)()
    prepare(sources, plan="plan", store=whole, encoder=encoder, shard_tokens=7)
    # A line may be longer than a piece.
    monkeypatch.setattr("elastictrain.data.formats.PIECE_BYTES", 20)
    index, _ = prepare(sources, plan="plan", store=parts, encoder=encoder, shard_tokens=7)
    tokens = {key: data for key, data in parts.objects.items() if key.endswith(".bin")}
    assert tokens == {key: data for key, data in whole.objects.items() if key.endswith(".bin")}
    assert index.num_documents == 5


@pytest.mark.parametrize("mistaken", ['{"text": ""}', '{"content": "a"}', "{"])
def test_mistaken_inputs_are_refused_and_the_corrected_command_starts_anew(
    memory_store: Any, tmp_path: Path, mistaken: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f"{mistaken}\n")
    sources, encoder = discover([str(tmp_path / "a.jsonl")]), Encoder(ByteTokenizer(), kind="jsonl", field="text")
    with pytest.raises(DataError, match=r"a\.jsonl"):
        prepare(sources, plan="plan", store=memory_store, encoder=encoder)
    assert memory_store.objects == {}
