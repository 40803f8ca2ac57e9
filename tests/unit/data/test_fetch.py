import errno
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from elastictrain.data.cache import CacheFolder, fetch_shards
from elastictrain.data.index import TokenIndex
from elastictrain.errors import DataError

TEXT = bytes(range(125)) * 8


@pytest.fixture
def index(memory_store: Any, prepare_bytes: Callable[..., TokenIndex]) -> TokenIndex:
    return prepare_bytes(memory_store, TEXT)


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache", budget_bytes=10**6)


def fetched(store: Any, index: TokenIndex, cache: CacheFolder) -> bytes:
    paths, lease = fetch_shards(store, index, cache=cache)
    lease.close()
    return b"".join(path.read_bytes() for path in paths)


def test_bytes_arrive_and_are_fetched_once(memory_store: Any, index: TokenIndex, cache: CacheFolder) -> None:
    whole = b"".join(memory_store.objects[shard.file] for shard in index.shards)
    memory_store.bytes_read = 0
    assert fetched(memory_store, index, cache) == whole
    assert memory_store.bytes_read >= len(whole)
    memory_store.bytes_read = 0
    assert fetched(memory_store, index, cache) == whole
    assert memory_store.bytes_read == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_cached_file_is_fetched_again(
    memory_store: Any, index: TokenIndex, cache: CacheFolder, tmp_path: Path, damage: str
) -> None:
    whole = fetched(memory_store, index, cache)
    victim = next((tmp_path / "cache").glob(f"*/{index.shards[3].file}"))
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[7] ^= 1
        victim.write_bytes(data)
    elif damage == "truncate":
        victim.write_bytes(data[:-2])
    else:
        victim.unlink()
    memory_store.bytes_read = 0
    assert fetched(memory_store, index, cache) == whole
    assert 0 < memory_store.bytes_read < 3 * len(data)


def test_a_full_disk_that_has_the_bytes_but_not_the_record_of_their_check_is_enough(
    memory_store: Any, index: TokenIndex, cache: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"".join(memory_store.objects[shard.file] for shard in index.shards)
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        if path.suffix == ".verified":
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_text(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write)
        assert fetched(memory_store, index, cache) == whole
    memory_store.bytes_read = 0
    assert fetched(memory_store, index, cache) == whole
    assert memory_store.bytes_read == 0


def test_a_damaged_source_is_refused_by_name(memory_store: Any, index: TokenIndex, cache: CacheFolder) -> None:
    data = bytearray(memory_store.objects["tokens-00002.bin"])
    data[0] ^= 1
    memory_store.objects["tokens-00002.bin"] = bytes(data)
    with pytest.raises(DataError, match=r"memory://tokens/tokens-00002\.bin"):
        fetched(memory_store, index, cache)


def test_bytes_damaged_on_the_way_are_fetched_a_second_time(
    memory_store: Any, index: TokenIndex, cache: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = memory_store.read_into
    damaged: set[str] = set()

    def read_badly_once(key: str, buffer: memoryview, *, start: int = 0) -> int:
        size: int = read_into(key, buffer, start=start)
        if key not in damaged:
            damaged.add(key)
            buffer[0] ^= 1
        return size

    whole = b"".join(memory_store.objects[shard.file] for shard in index.shards)
    monkeypatch.setattr(memory_store, "read_into", read_badly_once)
    assert fetched(memory_store, index, cache) == whole


@pytest.mark.parametrize("change", ["missing", "longer"])
def test_a_source_that_is_not_what_the_index_says(
    memory_store: Any, index: TokenIndex, cache: CacheFolder, change: str
) -> None:
    if change == "missing":
        memory_store.delete("tokens-00001.bin")
    else:
        memory_store.objects["tokens-00001.bin"] += b"xx"
    with pytest.raises(DataError, match=r"tokens-00001\.bin"):
        fetched(memory_store, index, cache)


def test_several_at_once_fetch_once(memory_store: Any, index: TokenIndex, cache: CacheFolder, tmp_path: Path) -> None:
    single = type(memory_store)()
    single.objects = dict(memory_store.objects)
    fetched(single, index, CacheFolder(tmp_path / "single", budget_bytes=10**6))
    memory_store.bytes_read = 0
    results: list[bytes] = []
    threads = [Thread(target=lambda: results.append(fetched(memory_store, index, cache))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 6
    assert memory_store.bytes_read == single.bytes_read
