import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.data.cache import CachedFolder, CacheFolder, choose_evictions, default_cache_dir, explained
from elastictrain.errors import DataError, HostUnfitError

ENTRIES = st.lists(
    st.builds(CachedFolder, st.uuids().map(str), st.integers(0, 50), st.floats(0, 100), st.booleans()),
    max_size=8,
    unique_by=lambda entry: entry.name,
)


@given(entries=ENTRIES, needed=st.integers(0, 60), budget=st.integers(0, 200))
def test_evictions_are_enough_and_no_more(entries: list[CachedFolder], needed: int, budget: int) -> None:
    chosen = choose_evictions(entries, needed_bytes=needed, budget_bytes=budget)
    held = sum(entry.size_bytes for entry in entries if entry.in_use)
    if chosen is None:
        assert held + needed > budget
        return
    by_name = {entry.name: entry for entry in entries}
    left = sum(entry.size_bytes for entry in entries if entry.name not in chosen)
    assert left + needed <= budget
    assert not any(by_name[name].in_use for name in chosen)
    if chosen:
        assert left + by_name[chosen[-1]].size_bytes + needed > budget
        kept = [entry.last_use for entry in entries if not entry.in_use and entry.name not in chosen]
        assert all(by_name[name].last_use <= use for name in chosen for use in kept)


def test_the_least_recently_used_entry_goes_first(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, budget_bytes=100)
    for number, name in enumerate(("old", "older")):
        cache.lease(name, size_bytes=40, source=name).close()
        os.utime(tmp_path / name / "use.lock", (100 - number, 100 - number))
    cache.lease("new", size_bytes=50, source="new").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.lock", "new", "old"]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, budget_bytes=10**9)
    lease = cache.lease("used", size_bytes=6 * 10**8, source="used")
    with pytest.raises(DataError, match="s3://b/new") as refused:
        cache.lease("new", size_bytes=5 * 10**8, source="s3://b/new")
    (problem,) = refused.value.problems
    assert problem.key == "data.cache_gb"
    assert ["1.1" in problem.message, "0.6 GB" in problem.message] == [True, True]
    lease.close()
    cache.lease("new", size_bytes=5 * 10**8, source="s3://b/new").close()
    assert not (tmp_path / "used").exists()


def test_too_small_for_one_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r">= 2\.1"):
        CacheFolder(tmp_path, budget_bytes=10**9).lease("t", size_bytes=2_000_000_001, source="s3://b/t")
    assert list(tmp_path.iterdir()) == [tmp_path / "cache.lock"]


def test_what_is_not_an_entry_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x" * 1000)
    CacheFolder(tmp_path, budget_bytes=100).lease("t", size_bytes=100, source="t").close()
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_an_entry_larger_than_it_said_counts_with_its_true_size(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, budget_bytes=1000)
    first = cache.lease("liar", size_bytes=1, source="liar")
    (first.folder / "data").write_bytes(b"x" * 900)
    first.close()
    cache.lease("new", size_bytes=500, source="new").close()
    assert not (tmp_path / "liar").exists()


def test_leftovers_of_a_killed_removal_go(tmp_path: Path) -> None:
    (tmp_path / ".removed-x").mkdir()
    (tmp_path / ".removed-x" / "data").write_bytes(b"x")
    CacheFolder(tmp_path, budget_bytes=10).lease("t", size_bytes=1, source="t").close()
    assert not (tmp_path / ".removed-x").exists()


def test_default_folder_follows_the_environment() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/big/cache"}) == Path("/big/cache/elastictrain")
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/elastictrain"
    assert default_cache_dir({}) == Path.home() / ".cache/elastictrain"


def test_disk_failures_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HostUnfitError, match=r"data\.cache_dir"), explained(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DataError, match=str(tmp_path)) as refused, explained(tmp_path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert [problem.key for problem in refused.value.problems] == ["data.cache_dir"]
