import json
import pickle
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.config.composed import DataGroup
from elastictrain.data.encoding import Encoder
from elastictrain.data.opening import OpenedData, open_datasets
from elastictrain.data.packing import pack
from elastictrain.data.prepare import prepare
from elastictrain.data.sources import discover
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.errors import DataError
from elastictrain.storage.opening import open_store
from tests.unit.examples import examples


@settings(max_examples=examples(200))
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), seq_len=st.integers(1, 12))
def test_each_token_of_a_document_is_a_target_once(lengths: list[int], seq_len: int) -> None:
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    ranges = pack(np.array(starts), num_tokens=ends[-1], seq_len=seq_len).tolist()
    assert all(0 < end - begin <= seq_len + 1 for begin, end in ranges)
    # A target is a token with another one of its document before it in the sample.
    targets = sorted(token for begin, end in ranges for token in range(begin + 1, end) if token not in starts)
    assert targets == sorted(set(range(ends[-1])) - set(starts))
    for start, end in zip(starts, ends, strict=True):
        cuts = [begin for begin, _ in ranges if start < begin < end]
        assert bool(cuts) == (end - start > seq_len + 1)
    # No sample ends before a document that would still have fitted.
    for (begin, end), following in pairwise(ranges):
        if end in starts and following[0] == end:
            assert ends[starts.index(end)] - begin > seq_len + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = ["abc", "de", "f" * 20, "gh", "i"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(
        discover([str(tmp_path / "a.jsonl")]),
        plan="plan",
        store=open_store(str(tmp_path / "tokens")),
        encoder=Encoder(ByteTokenizer(), kind="jsonl", field="text"),
        shard_tokens=9,
    )
    return tmp_path / "tokens"


def opened(path: object, *, tmp_path: Path, holdout_samples: int = 0, seq_len: int = 7) -> OpenedData:
    options = DataGroup(path=str(path), packing=True, holdout_samples=holdout_samples)
    return open_datasets(options, seq_len=seq_len, environment={"XDG_CACHE_HOME": str(tmp_path)})


def shown(data: Any) -> list[tuple[str, list[int]]]:
    decoded, samples = ByteTokenizer().decode, [data[number] for number in range(len(data))]
    return [(decoded(one["tokens"].tolist()).replace("\n\u2500\n", "."), one["documents"].tolist()) for one in samples]


PACKED = [
    ("abc.de.", [0, 0, 0, 0, 1, 1, 1]),
    ("fffffff", [0, 0, 0, 0, 0, 0, 0]),
    ("fffffff", [0, 0, 0, 0, 0, 0, 0]),
    ("fffffff", [0, 0, 0, 0, 0, 0, 0]),
    ("ff.gh..", [0, 0, 0, 1, 1, 1, -1]),
    ("i......", [0, 0, -1, -1, -1, -1, -1]),
]


def test_samples_of_whole_documents(folder: Path, tmp_path: Path) -> None:
    data = opened(folder, tmp_path=tmp_path, seq_len=6)
    assert shown(data.train) == PACKED
    assert data.holdout is None
    assert shown(pickle.loads(pickle.dumps(data.train))) == PACKED
    for index in (-1, len(PACKED)):
        with pytest.raises(IndexError):
            data.train[index]


def test_the_last_samples_are_held_out(folder: Path, tmp_path: Path) -> None:
    data = opened(folder, tmp_path=tmp_path, seq_len=6, holdout_samples=2)
    assert shown(data.train) == PACKED[:-2]
    assert shown(data.holdout) == PACKED[-2:]
    with pytest.raises(DataError) as caught:
        opened(folder, tmp_path=tmp_path, seq_len=6, holdout_samples=6)
    assert [problem.key for problem in caught.value.problems] == ["data.holdout_samples"]


def test_remote_folders_and_those_of_older_releases(folder: Path, tmp_path: Path) -> None:
    store = open_store("memory://packing")
    for file in folder.iterdir():
        store.write(file.name, file.read_bytes())
    plain = open_datasets(DataGroup(path="memory://packing"), seq_len=6, environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert len(plain.train) == 5
    assert shown(opened("memory://packing", tmp_path=tmp_path, seq_len=6).train) == PACKED
    record = json.loads((folder / "index.json").read_bytes())
    for one in record.pop("documents"):
        (folder / one["file"]).unlink()
    (folder / "index.json").write_text(json.dumps(record))
    assert shown(opened(folder, tmp_path=tmp_path, seq_len=6).train) == PACKED


def test_a_file_of_starts_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "documents-00001.bin").unlink()
    with pytest.raises(DataError, match=r"documents-00001\.bin"):
        opened(folder, tmp_path=tmp_path)
    assert len(open_datasets(DataGroup(path=str(folder)), seq_len=6, environment={}).train) == 5


def test_the_standard_library_can_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "lib" / name).write_text(name)
    monkeypatch.setattr("elastictrain.data.opening.library_folder", lambda: tmp_path / "lib")
    assert shown(opened("stdlib", tmp_path=tmp_path, seq_len=9).train) == [("a.py.b.py.", [0] * 5 + [1] * 5)]
