"""In processes of their own: what is set here holds for a whole interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, subprocess, sys
from elastictrain.bytecode import keep_bytecode
keep_bytecode(package="plain")
import plain
child = "import json, plain, sys; print(json.dumps([sys.pycache_prefix, sys.dont_write_bytecode, plain.__cached__]))"
told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
own = {"prefix": sys.pycache_prefix, "never": sys.dont_write_bytecode, "file": plain.__cached__}
print(json.dumps({**own, "child": json.loads(told)}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "plain.py").write_text("ANSWER = 42\n")
    (tmp_path / "temporary").mkdir()
    return folder


def run(package: Path, program: str = PROGRAM, **variables: str) -> Mapping[str, Any]:
    temporary = str(package.parent / "temporary")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(package)]),
        "TMPDIR": temporary,
        **variables,
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def test_bytecode_that_nobody_keeps_is_kept_in_a_private_folder(package: Path) -> None:
    found = run(package, PYTHONDONTWRITEBYTECODE="1")
    own = package.parent / "temporary" / f"elastictrain-{os.getuid()}"
    folder = str(own / "bytecode")
    assert own.stat().st_mode & 0o777 == 0o700
    assert found["prefix"] == folder
    assert found["file"].startswith(folder)
    assert Path(found["file"]).is_file()
    assert found["child"] == [folder, False, found["file"]], "processes that it starts do the same"
    assert not (package / "__pycache__").exists()


def test_where_there_is_bytecode_nothing_changes(package: Path) -> None:
    run(package, "import plain; print('{}')")
    assert (package / "__pycache__").is_dir()
    found = run(package, PYTHONDONTWRITEBYTECODE="1")
    assert (found["prefix"], found["never"]) == (None, True)
    assert found["child"][:2] == [None, True]


def test_a_folder_that_somebody_has_chosen_stays(package: Path, tmp_path: Path) -> None:
    chosen = str(tmp_path / "chosen")
    assert run(package, PYTHONPYCACHEPREFIX=chosen)["prefix"] == chosen


@pytest.mark.parametrize("gettempdir", ["lambda: 'taken'", "lambda: open('missing/folder')"])
def test_without_a_private_folder_nothing_changes(gettempdir: str, package: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / f"elastictrain-{os.getuid()}").write_text("")
    program = f"import os, tempfile; os.chdir({str(tmp_path)!r}); tempfile.gettempdir = {gettempdir}\n{PROGRAM}"
    found = run(package, program, PYTHONDONTWRITEBYTECODE="1")
    assert (found["prefix"], found["never"]) == (None, True)


@pytest.mark.parametrize("command", ["launch", "run"])
def test_commands_that_import_torch_keep_it(command: str, package: Path) -> None:
    (package / "sitecustomize.py").write_text(
        "import elastictrain.bytecode as b; b.keep_bytecode.__kwdefaults__['package'] = 'plain'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(package)]), "PYTHONDONTWRITEBYTECODE": "1"}
    temporary = package.parent / "temporary"
    line = [sys.executable, "-m", f"elastictrain.{command}", "--help"]
    subprocess.run(line, env={**environment, "TMPDIR": str(temporary)}, capture_output=True, check=True)
    kept = temporary / f"elastictrain-{os.getuid()}" / "bytecode"
    assert any(kept.rglob("elastictrain/config/load*.pyc"))
