"""A program is run as an interpreter of its own would run it."""

import atexit
import os
import sys
from pathlib import Path

import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.fault.reasons import Reason
from elastictrain.own_loop import session
from elastictrain.own_loop.program import run_program


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launcher"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(session, "command_line", session.command_line)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)


def program(tmp_path: Path, text: str) -> str:
    (tmp_path / "beside.py").write_text("value = 3\n")
    (tmp_path / "mine.py").write_text(text)
    return str(tmp_path / "mine.py")


def test_it_is_the_main_module_with_its_arguments_and_its_folder(tmp_path: Path) -> None:
    text = "import sys, beside\nassert (__name__, sys.argv[1:], beside.value) == ('__main__', ['a', '--', 'b'], 3)\n"
    assert run_program([program(tmp_path, text), "a", "--", "b"], overrides=["run.dir=x"], composed=None) == 0
    assert session.command_line.overrides == ("run.dir=x",)


def test_a_module_is_found_by_its_name(tmp_path: Path) -> None:
    program(tmp_path, "import sys\nsys.exit(int(sys.argv[1]))\n")
    sys.path[0] = str(tmp_path)
    assert run_program(["-m", "mine", "75"], overrides=[], composed=None) == 75


@pytest.mark.parametrize(
    ("text", "code"), [("import sys\nsys.exit('no data')", 1), ("import sys\nsys.exit(3)", 3), ("raise KeyError('key')", 70)]
)
def test_how_it_ends_is_told_to_the_launcher(
    text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    channel = os.open(tmp_path / "channel", os.O_WRONLY | os.O_CREAT)
    launcher = {"LAUNCHER": "7", "GENERATION": "1", "LAUNCH_FOLDER": str(tmp_path), "CHANNEL": str(channel)}
    for name, value in (*place.items(), *((f"ELASTICTRAIN_{name}", value) for name, value in launcher.items())):
        monkeypatch.setenv(name, value)
    assert run_program([program(tmp_path, text)], overrides=[], composed=None) == code
    os.close(channel)
    (reason,) = JsonLines(Reason).feed((tmp_path / "channel").read_bytes())
    assert (reason.rank, reason.exit_code) == (1, 70)
    # Of a traceback the frames that are the program's.
    assert capsys.readouterr().err.count("  File ") == (1 if code == 70 else 0)
