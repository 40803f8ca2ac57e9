import json
from pathlib import Path

import pytest

from elastictrain.data.hub import hub_snapshot
from elastictrain.data.sources import SourceFile, discover, format_of, split_of
from elastictrain.errors import DataError
from elastictrain.storage.opening import open_store


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def names(*given: object, **options: object) -> list[str]:
    return [source.name for source in discover([str(one) for one in given], **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["a.txt", "b.md", "c.txt.gz"], "text"),
        (["a.jsonl", "b.ndjson", "c.jsonl.gz"], "jsonl"),
        (["a.PARQUET"], "parquet"),
        (["https://host/a.parquet?download=true"], "parquet"),
        (["a.json"], None),
        (["a.parquet.gz"], None),
        (["a"], None),
        (["a.txt", "b.jsonl"], None),
    ],
)
def test_the_format_follows_from_suffixes(files: list[str], kind: str | None) -> None:
    sources = [SourceFile(file, file, 1, "") for file in files]
    if kind is None:
        with pytest.raises(DataError, match=files[-1]):
            format_of(sources)
    else:
        assert format_of(sources) == kind
    assert format_of(sources, given="text") == "text"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("validation.jsonl", "validation"),
        ("dev/part-0.parquet", "validation"),
        ("en.test.parquet", "test"),
        ("trainer/contest.parquet", ""),
        ("part-0.parquet", ""),
    ],
)
def test_the_split_that_a_name_tells(name: str, split: str) -> None:
    assert split_of(name) == split


def test_splits_are_not_mixed(tmp_path: Path) -> None:
    root = make(
        tmp_path, "README.md", "data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet", "data/extra-0.parquet"
    )
    with pytest.raises(DataError, match=r"test, train; pass --split"):
        discover([str(root)])
    assert names(root, split="train") == ["data/train-0.parquet", "data/train-1.parquet"]
    with pytest.raises(DataError, match="must have the split dev, but has test, train"):
        discover([str(root)], split="dev")
    assert names(root / "data", split="extra") == ["extra-0.parquet"]


def test_folders_that_datasets_has_saved(tmp_path: Path) -> None:
    root = make(tmp_path, "train/data-1.arrow", "train/data-0.arrow", "train/cache-x.arrow", "train/dataset_info.json")
    (root / "train/state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{i}.arrow"} for i in (0, 1)]}))
    assert names(root / "train") == ["data-0.arrow", "data-1.arrow"]
    (root / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert names(root) == ["train/data-0.arrow", "train/data-1.arrow"]
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="train, test; pass --split"):
        discover([str(root)])
    assert names(root, split="train") == ["train/data-0.arrow", "train/data-1.arrow"]
    for damage in ("[]", "{", '{"_data_files": [{"filename": "../x.arrow"}]}', '{"_data_files": [1]}'):
        (root / "train/state.json").write_text(damage)
        with pytest.raises(DataError, match=r"state\.json"):
            discover([str(root)], split="train")


def test_a_repository_in_the_local_hub(tmp_path: Path) -> None:
    root = make(tmp_path, "snapshots/aa/train.parquet", "snapshots/bb/train.parquet", "refs/pr/1")
    with pytest.raises(DataError, match="must have one revision, but has 2"):
        hub_snapshot(root)
    (root / "refs/main").write_text("bb\n")
    assert hub_snapshot(root) == root / "snapshots/bb"
    assert [source.url for source in discover([str(root)])] == [str(root / "snapshots/bb/train.parquet")]
    assert hub_snapshot(root / "snapshots") == root / "snapshots"


def test_remote_files_folders_and_patterns() -> None:
    store = open_store("memory://sources")
    for name in ("a/1.jsonl", "a/2.jsonl", "a/b/3.jsonl", "a/notes.md", "a/empty.jsonl"):
        store.write(name, b"" if "empty" in name else b"{}")
    assert names("memory://sources/a/2.jsonl", "memory://sources/a") == ["2.jsonl", "1.jsonl", "b/3.jsonl"]
    assert names("memory://sources/a/*.jsonl") == ["1.jsonl", "2.jsonl"]
    assert names("memory://sources/**/[13].jsonl") == ["a/1.jsonl", "a/b/3.jsonl"]
    for given in ("memory://sources/a/*.txt", "memory://sources/none"):
        with pytest.raises(DataError, match="must be"):
            discover([given])
