import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.data.index import Shard, TokenIndex, decode_index, encode_index, read_index
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.errors import DataError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store

INDEX = TokenIndex(
    "uint16", ByteTokenizer().description, 3, (Shard("tokens-00000.bin", 5, 10, "aa"), Shard("tokens-00001.bin", 2, 4, "bb"))
)


def test_survives_encoding() -> None:
    assert decode_index(encode_index(INDEX), url="x") == INDEX
    assert INDEX.num_tokens == 7
    assert INDEX.size_bytes == 14
    assert [INDEX.num_samples(length) for length in (1, 2, 3, 6, 7)] == [6, 3, 2, 1, 0]


def test_the_digest_names_the_tokens() -> None:
    assert INDEX.digest != replace(INDEX, shards=INDEX.shards[::-1]).digest
    assert INDEX.digest != replace(INDEX, dtype="uint32").digest


@pytest.mark.parametrize("name", sorted(json.loads(encode_index(INDEX))))
def test_no_field_can_be_lost_or_changed_unnoticed(name: str) -> None:
    record = json.loads(encode_index(INDEX))
    value = record.pop(name)
    with pytest.raises(DataError, match="index"):
        decode_index(json.dumps(record).encode(), url="data/index.json")
    record[name] = value + 1 if isinstance(value, int) else "other"
    with pytest.raises(DataError, match=r"index\.json"):
        decode_index(json.dumps(record).encode(), url="data/index.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\x00", b'{"format": "other"}', b"[" * 200_000, b"1" * 5_000])
def test_what_is_no_index_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(DataError, match=r"data/index\.json"):
        decode_index(data, url="data/index.json")


@pytest.mark.parametrize("file", ["../../secret", "/etc/passwd", "a/b", "..", ""])
def test_a_shard_never_leads_out_of_its_folder(file: str) -> None:
    data = encode_index(replace(INDEX, shards=(Shard(file, 5, 10, "aa"),)))
    with pytest.raises(DataError, match="is damaged"):
        decode_index(data, url="x")


def test_sizes_must_agree() -> None:
    data = encode_index(replace(INDEX, shards=(Shard("a", 5, 11, "aa"),)))
    with pytest.raises(DataError, match="contradicts itself"):
        decode_index(data, url="x")


def test_a_missing_index_says_how_to_make_one(memory_store: Store) -> None:
    with pytest.raises(DataError, match=r"--out memory://tokens"):
        read_index(memory_store)


def test_an_unfinished_folder_says_how_to_finish(memory_store: Store, prepare_bytes: Callable[..., TokenIndex]) -> None:
    prepare_bytes(memory_store, b"text")
    memory_store.delete("index.json")
    with pytest.raises(DataError, match=r"`prepare`"):
        read_index(memory_store)


def test_an_index_of_30_gb_is_none(tmp_path: Path) -> None:
    with (tmp_path / "index.json").open("wb") as file:
        file.truncate(30 << 30)
    with pytest.raises(DataError, match=r"index\.json"):
        read_index(open_store(str(tmp_path)))
