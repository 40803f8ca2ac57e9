import os
from pathlib import Path
from threading import Thread

import pytest

from elastictrain.data.cache import CacheFolder
from elastictrain.data.opening import belongs, content_digest, find_sources, library_folder, prepare_stdlib
from elastictrain.errors import DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "site-packages/torch/x.py", "test/t.py", "a/tests/t.py", "_sysconfigdata_x.py", "d.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "empty.py").write_text("")
    return root


def test_what_belongs() -> None:
    assert belongs("json/decoder.py")
    assert not belongs("json/decoder.pyc")
    assert not belongs("unittest/test/support.py")


def test_sources_come_in_name_order(library: Path) -> None:
    assert [document.name for document in find_sources(library)] == ["a/c.py", "b.py"]


def test_this_python_has_a_corpus() -> None:
    names = [document.name for document in find_sources(library_folder())]
    assert "json/decoder.py" in names
    assert len(names) > 500
    assert names == sorted(names)


def test_prepared_once_and_found_again(library: Path, tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "cache", budget_bytes=10**6)
    index, folder, lease = prepare_stdlib(cache, library=library)
    lease.close()
    assert (folder / "tokens-00000.bin").read_bytes()[0::2] == b"# a/c.py\n\0# b.py\n\0"
    written = (folder / "tokens-00000.bin").stat().st_mtime_ns
    # Another installation of the same text has other file times.
    os.utime(library / "b.py", (1, 1))
    again, same_folder, lease = prepare_stdlib(cache, library=library)
    lease.close()
    assert (again, same_folder) == (index, folder)
    assert (folder / "tokens-00000.bin").stat().st_mtime_ns == written


def test_other_text_is_another_corpus(library: Path) -> None:
    before = content_digest(find_sources(library))
    (library / "b.py").write_text("# B.py\n")
    assert content_digest(find_sources(library)) != before


def test_many_at_once(library: Path, tmp_path: Path) -> None:
    found = []

    def prepare() -> None:
        index, _, lease = prepare_stdlib(CacheFolder(tmp_path / "cache", budget_bytes=10**6), library=library)
        found.append(index)
        lease.close()

    threads = [Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({index.digest for index in found}) == 1


def test_a_python_without_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=stdlib"):
        find_sources(tmp_path)
