import time
from pathlib import Path

import pytest

from elastictrain.errors import TransientStorageError
from elastictrain.fault.stop import StopRequest
from elastictrain.launch.run_summary import print_summary
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from tests.unit.report.events import killed


def printed(url: str, request: StopRequest | None = None) -> list[str]:
    lines: list[str] = []
    print_summary(open_store(url), request, print_line=lines.append)
    return lines


def test_it_has_the_figures_and_the_command_that_has_more(tmp_path: Path) -> None:
    killed().save(tmp_path)
    (line,) = printed(str(tmp_path))
    assert "29.3%" in line
    assert line.endswith(f"python -m elastictrain.report {tmp_path}")


def test_a_run_that_never_began_has_none(tmp_path: Path) -> None:
    assert printed(str(tmp_path)) == []


def test_without_an_answer_there_is_the_command_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed().save(tmp_path)

    def fail(self: LocalStore, prefix: str = "") -> None:
        raise TransientStorageError("away")

    monkeypatch.setattr(LocalStore, "list", fail)
    (line,) = printed(str(tmp_path))
    assert "%" not in line
    assert str(tmp_path) in line


def test_after_the_deadline_nothing_is_read(tmp_path: Path) -> None:
    killed().save(tmp_path)
    (line,) = printed(str(tmp_path), StopRequest("SIGTERM", time.monotonic() - 30.0, time.monotonic() - 1.0))
    assert "%" not in line
