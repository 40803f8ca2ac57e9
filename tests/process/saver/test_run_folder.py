"""A disk that is unmounted while a run trains, which needs root and a namespace."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchruns import environment

PROGRAM = """
import shutil, subprocess, sys
from pathlib import Path
from elastictrain.checkpoint.run_folder import RunFolder
from elastictrain.errors import PermanentStorageError
from elastictrain.storage.opening import open_store

disk = Path(sys.argv[1])
run = disk / sys.argv[2]

def mount():
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").touch()

mount()
folder = RunFolder(open_store(str(run)))
assert folder.is_there()
subprocess.run(["umount", disk], check=True)
try:
    folder.is_there()
except PermanentStorageError as error:
    assert str(run) in str(error)
else:
    raise AssertionError("taken for deleted")
mount()
assert folder.is_there()
for one in run.iterdir():
    one.unlink()
assert not folder.is_there()
if run != disk:
    run.rmdir()
    assert not folder.is_there()
print("done")
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="mounts a disk, which needs root")
@pytest.mark.parametrize("run", ["runs/x", "."])
def test_an_unmounted_disk_is_told_from_a_deleted_run(run: str, tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", PROGRAM, str(tmp_path), run]
    done = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
