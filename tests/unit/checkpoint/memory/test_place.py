import os
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.place import is_private, make_private, run_folder, run_name
from elastictrain.errors import ConfigError


def test_one_run_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert run_name("run") == run_name(f"{tmp_path}/run/") == run_name(f"{tmp_path}/link")
    assert run_name("s3://bucket/run/") == run_name("s3://bucket/run") != run_name("run")
    assert run_folder("/dev/shm/", "run") == f"/dev/shm/elastictrain-{os.getuid()}/{run_name('run')}"


def test_private_folders(tmp_path: Path) -> None:
    folder = f"{tmp_path}/user/run"
    make_private(folder)
    make_private(folder)
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    Path(folder).chmod(0o750)
    with pytest.raises(ConfigError, match="alone can enter"):
        make_private(folder)


def test_a_link_is_no_private_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "user").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="alone can enter"):
        make_private(f"{tmp_path}/user/run")
    with pytest.raises(ConfigError, match="cannot be made"):
        make_private(f"{tmp_path}/not/there/run")


def test_the_last_run_of_a_user_may_end_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saver removes the user's folder when it is empty: between our making it, and our making one in it."""
    really_mkdir, taken_away = os.mkdir, []

    def mkdir(path: str, mode: int = 0o777) -> None:
        if path.endswith("/run") and not taken_away:
            taken_away.append(path)
            Path(path).parent.rmdir()
        really_mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    make_private(f"{tmp_path}/user/run")
    assert taken_away
    assert (tmp_path / "user/run").is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders to somebody else")
@pytest.mark.parametrize("of_others", ["user", "user/run"])
def test_a_folder_of_somebody_else_is_neither_used_nor_read(tmp_path: Path, of_others: str) -> None:
    make_private(f"{tmp_path}/user/run")
    assert is_private(f"{tmp_path}/user/run")
    assert is_private(f"{tmp_path}/none/run")
    os.chown(tmp_path / of_others, 54_321, 54_321)
    with pytest.raises(ConfigError, match=rf"checkpoint.memory_dir.* {tmp_path}/{of_others} must .* belongs to user 54321"):
        make_private(f"{tmp_path}/user/run")
    assert not is_private(f"{tmp_path}/user/run")
