import errno
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from elastictrain.errors import (
    AccessDeniedError,
    IrregularFileError,
    ObjectExistsError,
    PermanentStorageError,
    StorageFullError,
    TransientStorageError,
)
from elastictrain.storage.failures import Retrying, RetryOptions, errno_of
from elastictrain.storage.local import LocalStore, local_path
from elastictrain.storage.opening import create_secret, open_store
from elastictrain.storage.posix import temporary_name
from elastictrain.storage.writers import process_name

ONCE = Retrying(RetryOptions(attempts=1))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path), url="the-url", retrying=ONCE)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, times: int = 1000) -> None:
    """Lets the first calls of a function of `os` fail."""
    real, left = getattr(os, name), [times]

    def call(*arguments: Any, **options: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EACCES, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.ENOTDIR, PermanentStorageError),
        (errno.ESTALE, TransientStorageError),
        (errno.EIO, TransientStorageError),
    ],
)
@pytest.mark.parametrize("function", ["write", "fsync", "rename"])
def test_failed_write_leaves_the_old_object(
    number: int, kind: type[Exception], function: str, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a/b", b"old")
    failing(monkeypatch, function, number)
    with pytest.raises(kind, match=rf"the-url/a/b: {os.strerror(number)}"):
        store.write("a/b", b"new")
    with pytest.raises(kind, match=rf"the-url/a/b: {os.strerror(number)}"), store.open_writer("a/b") as writer:
        writer.write(b"new")
    monkeypatch.undo()
    assert store.read("a/b") == b"old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_root_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file/run"):
        store = LocalStore(str(root), url=str(root), retrying=ONCE)
        with pytest.raises(PermanentStorageError, match=rf"{root}/a") as refused:
            store.write("a", b"1")
        with pytest.raises(PermanentStorageError) as unlisted:
            list(store.list())
        assert [errno_of(one.value) for one in (refused, unlisted)] == [errno.ENOTDIR] * 2


def test_error_of_the_caller_passes_through(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), store.open_writer("a"):
        (tmp_path / "none").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_transient_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path), url="u", retrying=Retrying(RetryOptions(attempts=3), sleep=lambda _: None))
    failing(monkeypatch, "rename", errno.ESTALE, times=2)
    store.write("a", b"1")
    failing(monkeypatch, "pread", errno.EIO, times=2)
    assert store.read("a") == b"1"


def test_lost_answer_to_create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path), url="u", retrying=Retrying(RetryOptions(attempts=3), sleep=lambda _: None))
    link, calls = os.link, []

    def carried_out(source: str, target: str, **options: Any) -> None:
        calls.append(target)
        link(source, target, **options)
        if len(calls) == 1:
            raise OSError(errno.ETIMEDOUT, "lost")

    monkeypatch.setattr(os, "link", carried_out)
    store.create("a", b"mine")
    assert len(calls) == 2
    with pytest.raises(ObjectExistsError):
        store.create("a", b"mine")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_create_without_hard_links(number: int, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "link", number)
    store.create("a", b"1")
    with pytest.raises(ObjectExistsError):
        store.create("a", b"2")
    assert store.read("a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_content_then_name_then_folder_become_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        order.append(f"{kind} {Path(path).name if kind == 'folder' else ''}".strip())
        fsync(descriptor)

    def record_rename(source: str, target: str, **options: Any) -> None:
        order.append("rename")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    store = LocalStore(str(tmp_path / "new/run"), url="u", retrying=ONCE)
    store.write("x/a", b"1")
    assert sorted(order[:3]) == sorted(["folder run", "folder new", f"folder {tmp_path.name}"])
    assert order[3:] == ["file", "rename", "folder x"]
    order.clear()
    store.write("x/b", b"1")
    assert order == ["file", "rename", "folder x"]


def test_what_may_be_lost_with_the_power_waits_for_no_disk(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While gigabytes are on their way to the disk, each fsync would take seconds."""

    def refuse(_: int) -> None:
        raise AssertionError("fsync")

    monkeypatch.setattr(os, "fsync", refuse)
    fleeting = store.without_sync()
    fleeting.write("new/x/a", b"1")
    fleeting.write("new/x/a", b"2")
    fleeting.create("new/x/b", b"1")
    with pytest.raises(ObjectExistsError):
        fleeting.create("new/x/b", b"2")
    fleeting.delete("new/x/b")
    assert store.read("new/x/a") == b"2"
    assert [path.name for path in (tmp_path / "new/x").iterdir()] == ["a"]
    with pytest.raises(AssertionError, match="fsync"):
        store.write("new/x/a", b"3")


def test_temporary_files_are_hidden(store: LocalStore, tmp_path: Path) -> None:
    store.write("a/b", b"1")
    (tmp_path / "a/.tmp-x").write_bytes(b"")
    with store.open_writer("a/c") as writer:
        writer.write(b"1")
        assert [info.key for info in store.list()] == ["a/b"]
        assert len(list((tmp_path / "a").iterdir())) == 3


def test_deleting_the_last_object_removes_its_folders(store: LocalStore, tmp_path: Path) -> None:
    store.write("a/b/c/1", b"1")
    store.write("a/2", b"1")
    store.delete("a/b/c/1")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["2"]
    store.write("a/b/c/1", b"again")
    assert store.read("a/b/c/1") == b"again"
    store.delete("a/b/c/1")
    store.delete("a/2")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_another_process_pruned(store: LocalStore, tmp_path: Path) -> None:
    store.write("a/b/1", b"1")
    LocalStore(str(tmp_path), url="other", retrying=ONCE).delete("a/b/1")
    store.write("a/b/2", b"2")
    assert store.read("a/b/2") == b"2"


def test_sweep_spares_the_living_and_the_unknown(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / temporary_name(process_name())).write_bytes(b"")
    (tmp_path / "a" / temporary_name("")).write_bytes(b"")
    assert store.sweep_temporaries() == ()
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_writers_and_deleters_of_several_hosts_share_folders(tmp_path: Path) -> None:
    """Each deletes what it wrote, and with it folders that another one is about to use."""
    failed: list[Exception] = []

    def write_and_delete(number: int) -> None:
        store = open_store(str(tmp_path / "run"))
        try:
            for turn in range(150):
                key = f"preflight/trips/{number}-{turn}"
                store.create(key, b"x")
                store.write(key, b"y")
                assert store.read(key) == b"y"
                store.delete(key)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=write_and_delete, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def in_small_pieces(monkeypatch: pytest.MonkeyPatch, *, max_bytes: int) -> None:
    """The kernel takes no more than so many bytes in one call, as it may."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, memoryview(data)[:max_bytes]))


@pytest.mark.parametrize("way", ["write", "create", "create_secret", "open_writer"])
def test_a_short_write_is_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Small data are gathered and large ones are written through: both."""
    for size_bytes in (5000, 3 << 20):
        data = random.Random(size_bytes).randbytes(size_bytes)
        with monkeypatch.context() as patch:
            in_small_pieces(patch, max_bytes=size_bytes // 3)
            if way == "open_writer":
                with store.open_writer(f"a/{size_bytes}") as writer:
                    writer.write(data[:10])
                    writer.write(data[10:])
            elif way == "create_secret":
                create_secret(store, f"a/{size_bytes}", data)
            else:
                getattr(store, way)(f"a/{size_bytes}", data)
        assert store.read(f"a/{size_bytes}") == data


class TestFollowedLinks:
    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        (tmp_path / "store").mkdir()
        (tmp_path / "outside").write_bytes(b"precious")
        (tmp_path / "store" / "a").symlink_to("../outside")
        return tmp_path / "outside"

    @pytest.fixture
    def following(self, outside: Path) -> LocalStore:
        return LocalStore(str(outside.parent / "store"), url="the-url", retrying=ONCE, follow_links=True)

    def test_are_read(self, following: LocalStore) -> None:
        for store in (following, following.without_sync()):
            assert store.read("a") == b"precious"
            assert store.stat("a").size_bytes == 8

    def test_are_neither_written_nor_deleted_through(self, following: LocalStore, outside: Path) -> None:
        with pytest.raises(IrregularFileError):
            following.delete("a")
        with pytest.raises(IrregularFileError):
            following.write("a", b"new")
        assert outside.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("url", "path"), [("/x/y", "/x/y"), ("file:///x", "/x"), ("s3://x/y", None), ("file:///a%20b", "/a b"), ("file://x", None)]
)
def test_local_path(url: str, path: str | None) -> None:
    assert local_path(url) == path
