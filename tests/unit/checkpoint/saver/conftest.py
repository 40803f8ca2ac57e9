from pathlib import Path

import pytest

from elastictrain.checkpoint.saver.pending_snapshots import known_layout


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A path of a socket has at most 107 characters.
    monkeypatch.chdir(tmp_path)
    # The folders of all tests have the same relative name.
    known_layout.cache_clear()
    Path("memory").mkdir()
    return Path("memory")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    for name in ("000001-aa", "000002-bb"):
        (folder / f"events/{name}-r00000.jsonl").write_text("")
    return folder
