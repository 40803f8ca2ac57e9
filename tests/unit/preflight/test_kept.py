import os
from pathlib import Path

import pytest

from elastictrain.preflight.kept import keep, load_kept


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.json"
    assert load_kept(path) is None
    keep(path, {"a": 1})
    keep(path, {"a": 2})
    assert load_kept(path) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["kept.json"]


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": "' + b"x" * (1 << 20) + b'"}'])
def test_what_cannot_be_understood_is_unknown(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(data)
    assert load_kept(path) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    path, target = tmp_path / "kept.json", tmp_path / "target"
    target.write_text('{"a": 1}')
    path.symlink_to(target)
    assert load_kept(path) is None
    keep(path, {"a": 2})
    assert target.read_text() == '{"a": 1}'
    assert not path.is_symlink()
    assert load_kept(path) == {"a": 2}


def test_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kept.json")
    assert load_kept(tmp_path / "kept.json") is None


def test_a_file_of_somebody_else_is_believed_only_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shared" / "kept.json"
    keep(path, {"a": 1})
    path.parent.chmod(0o1777)
    assert load_kept(path) == {"a": 1}
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    assert load_kept(path) is None
    path.parent.chmod(0o755)
    assert load_kept(path) == {"a": 1}


def test_nothing_remains_of_what_cannot_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        keep(path, {"a": 1})
    assert list(tmp_path.iterdir()) == [path]
