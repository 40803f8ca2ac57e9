"""The last resort: a process that reports its end does end, also when the interpreter's lock is never released."""

import subprocess
import sys
import time

import pytest
from torchruns import environment

BEGIN = "import ctypes, time; from elastictrain.fault.exits import limit_the_end; limit_the_end(0.5, exit_code=71); "


@pytest.mark.parametrize(
    ("hang", "exit_code"), [("time.sleep(60)", 71), ("ctypes.PyDLL(None).sleep(60)", 1)], ids=["waiting", "holding-the-lock"]
)
def test_a_process_that_hangs_while_it_ends_is_ended(hang: str, exit_code: int) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + hang], env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == exit_code, done.stderr
    assert time.monotonic() - began < 20
