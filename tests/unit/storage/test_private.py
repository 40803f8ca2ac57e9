import os
import socket
import stat
from pathlib import Path

import pytest

from elastictrain.errors import AccessDeniedError, HostUnfitError, IrregularFileError
from elastictrain.storage.failures import Retrying, RetryOptions
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import create_secret
from elastictrain.storage.private import (
    NameTakenError,
    make_private_folder,
    make_private_folders,
    open_private_file,
    temporary_folder,
    who_else_may_write,
    why_not_private,
    write_file,
)

STRANGER = 54_321
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to somebody else")


def store_at(folder: Path) -> LocalStore:
    return LocalStore(str(folder), url=str(folder), retrying=Retrying(RetryOptions(attempts=1)))


def seen(mode: int, *, uid: int = 1000) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, uid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "folder", "private"),
    [
        (stat.S_IFDIR | 0o700, 1000, True, True),
        (stat.S_IFDIR | 0o710, 1000, True, False),
        (stat.S_IFDIR | 0o701, 1000, True, False),
        (stat.S_IFDIR | 0o700, 0, True, False),
        (stat.S_IFLNK | 0o700, 1000, True, False),
        (stat.S_IFREG | 0o700, 1000, True, False),
        (stat.S_IFREG | 0o600, 1000, False, True),
        (stat.S_IFREG | 0o602, 1000, False, False),
        (stat.S_IFREG | 0o600, 1001, False, False),
        (stat.S_IFDIR | 0o700, 1000, False, False),
        (stat.S_IFIFO | 0o600, 1000, False, False),
        (stat.S_IFSOCK | 0o600, 1000, False, False),
    ],
)
def test_what_is_private(mode: int, uid: int, folder: bool, private: bool) -> None:
    why = why_not_private("/tmp/name", seen(mode, uid=uid), folder=folder, own_uid=1000)
    assert (why == "") is private
    if not private:
        assert "/tmp/name" in why
        assert f"user {uid}" in why


@pytest.mark.parametrize(
    ("mode", "uid", "others"),
    [
        (stat.S_IFREG | 0o644, 1000, False),
        (stat.S_IFREG | 0o600, 0, False),
        (stat.S_IFDIR | 0o755, 0, False),
        (stat.S_IFREG | 0o600, 1001, True),
        (stat.S_IFREG | 0o620, 1000, True),
        (stat.S_IFREG | 0o602, 0, True),
        (stat.S_IFDIR | 0o777, 1000, True),
        (stat.S_IFDIR | stat.S_ISVTX | 0o777, 0, True),
        (stat.S_IFLNK | 0o777, 1000, False),
        (stat.S_IFLNK | 0o777, 1001, True),
    ],
)
def test_who_else_may_write(mode: int, uid: int, others: bool) -> None:
    assert bool(who_else_may_write("/run/x", seen(mode, uid=uid), own_uid=1000)) is others


def test_what_is_made_is_private(tmp_path: Path) -> None:
    for _ in range(2):
        make_private_folder(f"{tmp_path}/folder")
        os.close(open_private_file(f"{tmp_path}/file"))
    assert stat.filemode((tmp_path / "folder").stat().st_mode) == "drwx------"
    assert stat.filemode((tmp_path / "file").stat().st_mode) == "-rw-------"


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "socket", "folder", "open to others", "stranger"])
def test_a_name_that_is_taken_is_not_used_and_the_message_says_by_whom(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "name", tmp_path / "elsewhere"
    elsewhere.touch(0o600)
    owner = os.getuid()
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "link":
                path.symlink_to(elsewhere)
            case "dangling":
                path.symlink_to(tmp_path / "nothing")
            case "fifo":
                os.mkfifo(path, 0o600)
            case "socket":
                listener.bind(str(path))
            case "folder":
                path.mkdir(0o700)
            case "open to others":
                path.touch()
                path.chmod(0o644)
            case _:
                if owner != 0:
                    pytest.skip("only root can give files to somebody else")
                path.touch(0o600)
                os.chown(path, STRANGER, STRANGER)
                owner = STRANGER
        with pytest.raises(NameTakenError, match=f"{path} .* {owner} ") as refused:
            open_private_file(str(path))
        assert refused.value.strerror
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", ["link", "file", "open to others", "stranger"])
def test_a_folder_that_is_taken_is_not_used(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.storage.private.tempfile.gettempdir", lambda: str(tmp_path))
    path = tmp_path / f"elastictrain-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(0o700)
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "file":
            path.touch(0o600)
        case "open to others":
            path.mkdir()
            path.chmod(0o777)
        case _:
            if os.getuid() != 0:
                pytest.skip("only root can give files to somebody else")
            path.mkdir(0o700)
            os.chown(path, STRANGER, STRANGER)
    with pytest.raises(NameTakenError):
        make_private_folder(str(path))
    with pytest.raises(HostUnfitError, match="TMPDIR"):
        temporary_folder()


def test_a_secret_is_one(tmp_path: Path) -> None:
    store = store_at(tmp_path / "run")
    create_secret(store, "launch/token", b"secret" * 8)
    path = tmp_path / "run/launch/token"
    assert stat.filemode(path.stat().st_mode) == "-rw-------"
    assert store.read_secret("launch/token", max_bytes=4096) == b"secret" * 8
    assert store.read_secret("launch/token", max_bytes=6) == b"secret"


def test_a_secret_that_others_can_read_is_closed_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_at(tmp_path)
    store.create("token", b"secret")
    (tmp_path / "token").chmod(0o644)
    for _ in range(2):
        assert store.read_secret("token", max_bytes=10) == b"secret"
    assert stat.filemode((tmp_path / "token").stat().st_mode) == "-rw-------"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / "token") in caplog.text


def test_a_file_system_without_modes_is_told_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(tmp_path)
    store.create("token", b"secret")
    (tmp_path / "token").chmod(0o644)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    assert store.read_secret("token", max_bytes=10) == b"secret"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("kind", ["link", "fifo", "stranger"])
def test_a_secret_of_somebody_else_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "token"
    (tmp_path / "elsewhere").write_bytes(b"known")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            os.mkfifo(path, 0o600)
        case _:
            if os.getuid() != 0:
                pytest.skip("only root can give files to somebody else")
            path.write_bytes(b"known")
            path.chmod(0o600)
            os.chown(path, STRANGER, STRANGER)
    with pytest.raises((AccessDeniedError, IrregularFileError), match=str(path)):
        store_at(tmp_path).read_secret("token", max_bytes=10)


@AS_ROOT
def test_a_file_server_may_have_its_own_number_for_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(tmp_path)
    create_secret(store, "token", b"secret")
    monkeypatch.setattr(os, "getuid", lambda: STRANGER)
    assert store.read_secret("token", max_bytes=10) == b"secret"
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_a_parent_that_another_run_removes_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lstat, removed = tmp_path / "parent" / "run", os.lstat, []

    def remove_first(name: str) -> os.stat_result:
        if not removed:
            removed.append(name)
            Path(name).rmdir()
        return lstat(name)

    monkeypatch.setattr(os, "lstat", remove_first)
    make_private_folders(str(path))
    assert removed == [str(path.parent)]
    assert path.is_dir()


def test_a_write_leaves_the_old_file_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}/file"
    write_file(path, b"old")

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.rename", broken)
    with pytest.raises(OSError, match="Input/output"):
        write_file(path, b"new")
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("file", b"old")]
