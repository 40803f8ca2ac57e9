"""Ctrl-C while a command is still being imported ends it without a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
from torchruns import environment

HOOK = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        # Ctrl-C does not reach the fork server, which is in a session of its own.
        if name == os.environ.get("INTERRUPTED_AT") and "elastictrain.launch.fork_server" not in sys.orig_argv:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize(
    ("module", "imported", "code"),
    [
        ("elastictrain.launch", "elastictrain.config.composed", 75),
        ("elastictrain.launch", "elastictrain.storage.opening", 75),
        ("elastictrain.preflight", "elastictrain.config.composed", 130),
        ("elastictrain.preflight", "elastictrain.surroundings", 130),
    ],
)
def test_an_import_is_interrupted(module: str, imported: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    variables = environment({"INTERRUPTED_AT": imported})
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", module], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
