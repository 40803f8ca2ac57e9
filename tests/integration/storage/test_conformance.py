import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from elastictrain.storage.opening import open_store, without_sync
from elastictrain.storage.store import Store
from tests.integration.storage.conformance import CHECKS, FOLDER_CHECKS, KINDS, intruders, keys


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Store], None], kind: str, tmp_path: Path) -> None:
    check(open_store(str(tmp_path / "not/there/yet") if kind == "local" else f"memory://{uuid4().hex}/run"))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("check", FOLDER_CHECKS, ids=lambda check: check.__name__)
def test_what_is_no_regular_file(check: Callable[[Store, Path, Path], None], sync: bool, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    check(store if sync else without_sync(store), tmp_path / "run", tmp_path / "outside")


def test_each_name_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, store = tmp_path / "run", open_store(str(tmp_path / "run"))
    store.write("a/good", b"good")
    with intruders(tmp_path / "outside", tuple(root / "a" / kind for kind in KINDS)):
        for _ in range(3):
            assert keys(without_sync(store)) == ["a/good"]
    told = [record.getMessage() for record in caplog.records]
    assert [sum(f"/a/{kind} " in line for line in told) for kind in KINDS] == [1] * len(KINDS)


def test_only_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    store = open_store(str(tmp_path / "run"))
    store.write("a/b", b"1")
    assert (tmp_path / "real/a/b").read_bytes() == b"1"
    (tmp_path / "run").unlink()
    (tmp_path / "run").symlink_to("elsewhere")
    store.write("a/c", b"2")
    assert keys(store) == ["a/b", "a/c"]
    assert not (tmp_path / "elsewhere").exists()


def test_names_that_no_key_can_have_are_passed_over(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("a/good", b"1")
    deep = tmp_path / "/".join(["deep"] * 40)
    for folder, name in ((tmp_path / "a", b"\xff"), (tmp_path / ".tmp-folder", b"object"), (deep, b"object")):
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, os.fsdecode(name)).write_bytes(b"")
    assert keys(store) == ["a/good"]
