from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elastictrain.errors import ConfigError, PermanentStorageError
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import check_writable, open_store
from elastictrain.storage.store import Store


@pytest.mark.parametrize("url", ["{}", "{}/", "file://{}", "local://{}/"])
def test_paths(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    store = open_store(url)
    store.write("a", b"1")
    assert isinstance(store, LocalStore)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert store.url == url.rstrip("/")


def test_relative_path_is_fixed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("run")
    monkeypatch.chdir("/")
    store.write("a", b"1")
    assert (tmp_path / "run/a").exists()


def test_memory_is_shared_by_name() -> None:
    open_store("memory://shared/run/").write("a", b"1")
    assert open_store("memory://shared/run").read("a") == b"1"
    assert open_store("memory://shared").read("run/a") == b"1"


@pytest.mark.parametrize(("url", "says"), [("nope://b/x", "'nope'"), ("s3://", "bucket"), ("file://a/b", "file:///")])
def test_bad_urls(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_missing_package(protocol: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(fsspec, "get_filesystem_class", absent)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        open_store(f"{protocol}://bucket/run")


class Careless:
    """A store that forgets one thing."""

    def __init__(self, store: Store, fault: str) -> None:
        self._store = store
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        (self._store.write if self._fault == "condition" else self._store.create)(key, data)

    def list(self, prefix: str = "") -> Iterator[Any]:
        return iter(()) if self._fault == "list" else self._store.list(prefix)

    def read(self, key: str) -> bytes:
        return b"" if self._fault == "read" else self._store.read(key)


@pytest.mark.parametrize(("fault", "says"), [("condition", "If-None-Match"), ("list", "listed"), ("read", "/object")])
def test_check_writable_finds_out(fault: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PermanentStorageError, match=says):
        check_writable(Careless(open_store(str(tmp_path)), fault))
    assert list(tmp_path.iterdir()) == []
