"""Stores across the death and the fork of processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from tests.process.s3.server import S3Server

SAVE_AND_HANG = """
import os, sys, time
from elastictrain.storage.opening import open_store
def hang(*_, **__):
    print("ready", flush=True)
    time.sleep(60)
setattr(os, sys.argv[2], hang)
store = open_store(sys.argv[1])
if sys.argv[3] == "create":
    store.create("folder/object", b"new")
elif sys.argv[3] == "write":
    store.write("folder/object", b"new")
else:
    with store.open_writer("folder/object") as writer:
        writer.write(b"new")
"""


@pytest.mark.parametrize(("hang_in", "action"), [("rename", "write"), ("rename", "stream"), ("link", "create")])
def test_killed_before_the_new_name(hang_in: str, action: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert isinstance(store, LocalStore)
    store.write("folder/other", b"other")
    if action != "create":
        store.write("folder/object", b"old")
    before = list(store.list())
    command = [sys.executable, "-c", SAVE_AND_HANG, str(tmp_path), hang_in, action]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert store.sweep_temporaries() == ()
        child.send_signal(signal.SIGKILL)
    assert list(store.list()) == before
    if action != "create":
        assert store.read("folder/object") == b"old"
    assert len(list((tmp_path / "folder").iterdir())) == len(before) + 1
    assert len(store.sweep_temporaries("folder")) == 1
    assert len(list((tmp_path / "folder").iterdir())) == len(before)
    store.write("folder/object", b"new")
    assert store.read("folder/object") == b"new"


@pytest.mark.s3
def test_fork(s3_server: S3Server) -> None:
    script = """
import os
from elastictrain.storage.opening import open_store
store = open_store("s3://bucket/fork")
store.write("parent", b"1")
if os.fork() == 0:
    store.write("child", store.read("parent"))
    os._exit(0)
assert os.wait()[1] == 0
assert [info.key for info in store.list()] == ["child", "parent"]
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **s3_server.environment}, timeout=60, check=True)
