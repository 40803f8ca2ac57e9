import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.data.index import Shard, TokenIndex
from elastictrain.data.opening import training_samples
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.data.tokens import TokenDataset
from elastictrain.errors import DataError
from tests.unit.examples import examples


def dataset_of(folder: Path, sizes: list[int], *, seq_len: int, first_sample: int = 0, num_samples: int) -> TokenDataset:
    """Shards of the given sizes that hold 0, 1, 2, ..."""
    shards, start = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"tokens-{number:05d}.bin"
        path.write_bytes(b"".join((start + i).to_bytes(2, "little") for i in range(size)))
        shards.append(Shard(path.name, size, 2 * size, ""))
        start += size
    index = TokenIndex("uint16", ByteTokenizer().description, 1, tuple(shards))
    return TokenDataset(
        index,
        paths=[folder / shard.file for shard in shards],
        seq_len=seq_len,
        first_sample=first_sample,
        num_samples=num_samples,
    )


@settings(max_examples=examples(40))
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), seq_len=st.integers(1, 7), data=st.data())
def test_samples_are_windows_of_the_concatenation(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, data: st.DataObject
) -> None:
    num_samples = (sum(sizes) - 1) // seq_len
    if num_samples < 1:
        return
    first = data.draw(st.integers(0, num_samples - 1))
    dataset = dataset_of(
        tmp_path_factory.mktemp("tokens"), sizes, seq_len=seq_len, first_sample=first, num_samples=num_samples - first
    )
    for index in range(len(dataset)):
        start = (first + index) * seq_len
        tokens = dataset[index]["tokens"]
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == list(range(start, start + seq_len + 1))


def test_index_outside_the_data_set(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [10], seq_len=2, num_samples=4)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            dataset[index]


def test_travels_to_another_process(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [7, 10_000], seq_len=3, num_samples=3000)
    before = dataset[2]["tokens"]
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data)[2]["tokens"], before)


def test_large_token_ids_and_uint32(tmp_path: Path) -> None:
    path = tmp_path / "tokens-00000.bin"
    path.write_bytes(b"".join(value.to_bytes(4, "little") for value in (1, 2**31 + 5, 3)))
    index = TokenIndex("uint32", ByteTokenizer().description, 1, (Shard(path.name, 3, 12, ""),))
    dataset = TokenDataset(index, paths=[path], seq_len=2, first_sample=0, num_samples=1)
    assert dataset[0]["tokens"].tolist() == [1, 2**31 + 5, 3]


@given(num_tokens=st.integers(2, 5000), seq_len=st.integers(1, 100), holdout=st.integers(0, 60))
def test_holdout_is_the_end_and_is_never_trained_on(num_tokens: int, seq_len: int, holdout: int) -> None:
    num_samples = (num_tokens - 1) // seq_len
    if num_samples <= holdout:
        with pytest.raises(DataError):
            training_samples(num_tokens, seq_len=seq_len, holdout_samples=holdout, source="data")
        return
    num_train = training_samples(num_tokens, seq_len=seq_len, holdout_samples=holdout, source="data")
    assert num_train == num_samples - holdout


def test_too_few_tokens_names_the_key() -> None:
    with pytest.raises(DataError, match="<= 9") as refused:
        training_samples(10, seq_len=10, holdout_samples=0, source="x")
    assert [problem.key for problem in refused.value.problems] == ["train.seq_len"]


def test_straddling_shards_from_prepared_files(
    tmp_path: Path, memory_store: object, prepare_bytes: Callable[..., TokenIndex]
) -> None:
    store = memory_store
    index = prepare_bytes(store, b"abcdefghij", shard_tokens=4)
    for shard in index.shards:
        (tmp_path / shard.file).write_bytes(store.objects[shard.file])  # type: ignore[attr-defined]
    dataset = TokenDataset(
        index, paths=[tmp_path / shard.file for shard in index.shards], seq_len=5, first_sample=0, num_samples=2
    )
    assert bytes(dataset[0]["tokens"].tolist()) == b"abcdef"
    assert dataset[1]["tokens"].tolist() == [*b"fghij", 256]
