"""In processes of their own: what is set here holds for a whole interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastictrain.bytecode import COMPILED_PREFIX

ROOT = Path(__file__).parents[2]
ROOM = "room_bytes=0"
PROGRAM = """
import json, os, subprocess, sys
from elastictrain.bytecode import bytecode_kept
before = sys.pycache_prefix, sys.dont_write_bytecode
with bytecode_kept("plain", {room}):
    import plain
    child = [sys.executable, "-c", "import sys; print(sys.pycache_prefix, sys.dont_write_bytecode)"]
    inherited = subprocess.run(child, capture_output=True, text=True, check=True).stdout.split()
assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
print(json.dumps({{"file": plain.__cached__, "kept": os.path.exists(plain.__cached__), "inherited": inherited}}))
"""
NEVER = {"PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages" / "plain"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("ANSWER = 42\n")
    (tmp_path / "temporary").mkdir()
    return folder


def run(package: Path, *, room: str = ROOM, first: str = "", **variables: str) -> Mapping[str, Any]:
    """`first`: code before the program's own."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(package.parent)]),
        "TMPDIR": str(own(package).parent),
        **variables,
    }
    command = [sys.executable, "-c", f"{first}\n{PROGRAM.format(room=room)}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def own(package: Path) -> Path:
    """The user's temporary folder."""
    return package.parents[1] / "temporary" / f"elastictrain-{os.getuid()}"


def test_bytecode_that_nobody_keeps_is_kept_in_a_private_folder(package: Path) -> None:
    found = run(package, **NEVER)
    (folder,) = own(package).iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.name.startswith(COMPILED_PREFIX), "it is removed when no start has used it for a week"
    assert found == {"file": found["file"], "kept": True, "inherited": ["None", "True"]}
    assert found["file"].startswith(f"{folder}/")
    assert run(package, **NEVER) == found
    # Another image may have other files with these paths, sizes and times.
    (package.parent / "other-2.0.dist-info").mkdir()
    assert Path(run(package, **NEVER)["file"]).relative_to(own(package)).parts[0] != folder.name
    assert not (package / "__pycache__").exists()


def test_files_of_another_user_are_no_place_for_it(package: Path) -> None:
    refuse = "import os; os.access = lambda path, mode: mode != os.W_OK"
    found = run(package, first=refuse)
    assert found["file"].startswith(str(own(package)))


@pytest.mark.parametrize("never", [True, False])
def test_where_there_is_bytecode_nothing_changes(never: bool, package: Path) -> None:
    run(package)
    assert (package / "__pycache__").is_dir()
    assert run(package, **NEVER if never else {})["file"].startswith(str(package))
    assert not own(package).exists()


def test_where_python_keeps_it_nothing_changes(package: Path) -> None:
    found = run(package)
    assert found == {"file": found["file"], "kept": True, "inherited": ["None", "False"]}
    assert found["file"].startswith(str(package))
    assert not own(package).exists()


def test_a_folder_that_somebody_has_chosen_stays(package: Path, tmp_path: Path) -> None:
    assert run(package, PYTHONPYCACHEPREFIX=str(tmp_path / "chosen"), **NEVER)["file"].startswith(str(tmp_path / "chosen"))


@pytest.mark.parametrize(
    ("room", "first"),
    [
        ("room_bytes=1 << 60", ""),
        (ROOM, "import tempfile; tempfile.gettempdir = lambda: open('/missing/folder')"),
        (ROOM, "import os; open(f'{os.environ[\"TMPDIR\"]}/elastictrain-{os.getuid()}', 'w').close()"),
    ],
)
def test_without_room_or_a_private_folder_nothing_changes(room: str, first: str, package: Path) -> None:
    found = run(package, room=room, first=first, **NEVER)
    assert found == {"file": found["file"], "kept": False, "inherited": ["None", "True"]}
