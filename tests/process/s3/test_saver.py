"""Runs whose saver writes to a store that fails: training goes on, says what is wrong, and is saved when the store is back."""

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchruns import TINY, alone, environment, events, free_port, last_wins, losses, savers, wait_until

from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.process.s3.faultproxy import (
    Answer,
    DropAnswer,
    DropRequest,
    Fault,
    FaultProxy,
    Request,
    Stall,
    seeded,
)
from tests.process.s3.server import bring, environment_for

pytestmark = pytest.mark.s3

STEPS = 30
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    "optim.schedule=constant",
    "train.eval_every_steps=0",
    "checkpoint.snapshot_every_steps=3",
    "checkpoint.every_steps=5",
)
FAULTS: tuple[Fault, ...] = (
    Answer(503, "SlowDown"),
    Answer(500, "InternalError"),
    DropRequest(1000),
    DropAnswer(),
    DropAnswer(10),
)


def run(url: str, *arguments: str, endpoint: str, folder: Path, timeout_s: float = 200) -> tuple[int, str]:
    """One worker to its end; nothing of it may be left."""
    outcome = alone(
        (*ARGUMENTS, f"run.dir={url}", *arguments),
        folder=folder / "log",
        timeout_s=timeout_s,
        extra_environment=environment_for(endpoint) if endpoint else {},
    )
    wait_until(lambda: not savers(folder), timeout_s=60, what="end of the saver")
    return outcome


def test_a_storm_of_failures_costs_nothing(store: Store, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    s3_proxy.follow(seeded(5, share=0.2, faults=FAULTS))
    code, output = run(store.url, f"train.steps={STEPS}", "task.pause_s=0.01", endpoint=s3_proxy.endpoint, folder=tmp_path)
    assert code == 0, output
    run_dir = bring(store, tmp_path / "copy")
    saved = [row["step"] for row in events(run_dir, "checkpoint_saved")]
    assert saved[-1] == STEPS
    assert not events(run_dir, "checkpoint_failed")
    assert s3_proxy.broken
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))


def test_a_store_that_stalls_stops_nothing_and_is_told_of(store: Store, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    began: list[float] = []

    def stalls(request: Request) -> Fault | None:
        """Whatever concerns the first checkpoint gets no answer for a while."""
        if "/checkpoints/step-000000005/" not in request.target or request.method != "PUT":
            return None
        began.append(time.time())
        return Stall(30.0) if began[-1] - began[0] < 15 else None

    s3_proxy.follow(stalls)
    arguments = ("train.steps=150", "task.pause_s=0.05", "checkpoint.every_steps=5")
    code, output = run(store.url, *arguments, endpoint=s3_proxy.endpoint, folder=tmp_path)
    assert code == 0, output
    run_dir = bring(store, tmp_path / "copy")
    steps = [row["time"] for row in events(run_dir, "step")]
    # Between the stall's beginning and the client's giving up on the answer training went on, at its pace.
    assert sum(began[0] < at < began[0] + 15 for at in steps) > 30
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) < 10
    saved = [row["step"] for row in events(run_dir, "checkpoint_saved")]
    assert saved[0] == 5
    assert saved[-1] == 150
    assert not events(run_dir, "checkpoint_failed")
    assert sorted(losses(run_dir)) == list(range(1, 151))


def test_a_bucket_that_refuses_for_a_while_is_told_of_and_used_again(
    store: Store, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    refused = Answer(403, "AccessDenied")

    def at_first(request: Request) -> Fault | None:
        match = re.search(r"/checkpoints/step-(\d+)", request.target)
        return refused if request.method == "PUT" and match is not None and int(match[1]) <= 10 else None

    s3_proxy.follow(at_first)
    code, output = run(store.url, f"train.steps={STEPS}", "task.pause_s=0.02", endpoint=s3_proxy.endpoint, folder=tmp_path)
    assert code == 0, output
    assert "checkpoint failed (1 in a row): " in output
    assert "credentials" in output
    run_dir = bring(store, tmp_path / "copy")
    failed = events(run_dir, "checkpoint_failed")
    assert {row["step"] for row in failed} <= set(range(5, 11))
    assert [row["in_a_row"] for row in failed] == list(range(1, len(failed) + 1))
    assert events(run_dir, "checkpoint_saved")[-1]["step"] == STEPS


def test_a_bucket_that_refuses_for_good_ends_the_run(store: Store, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    def saves(request: Request) -> Fault | None:
        return Answer(403, "AccessDenied") if request.method == "PUT" and "/checkpoints/step-" in request.target else None

    s3_proxy.follow(saves)
    arguments = ("train.steps=100000", "task.pause_s=0.01", "checkpoint.max_failed_saves=2")
    code, output = alone(
        (*ARGUMENTS, f"run.dir={store.url}", *arguments),
        folder=tmp_path / "log",
        extra_environment=environment_for(s3_proxy.endpoint),
    )
    # What the bucket refused is kept, and written when it is taken.
    assert savers(tmp_path)
    s3_proxy.follow(lambda _: None)
    wait_until(lambda: not savers(tmp_path), timeout_s=90, what="end of the saver")
    assert any(info.key.endswith("/manifest.json") for info in store.list("checkpoints"))
    assert code == 74, output
    assert "2 checkpoints in a row could not be saved (`checkpoint.max_failed_saves` is 2)" in output
    assert "Traceback" not in output


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        run_dir, filler = disk / "run", disk / "filler"
        # Room for records, but not for a checkpoint.
        filler.write_bytes(bytes((8 << 20) - (400 << 10)))
        command = [sys.executable, "-m", "elastictrain.run", *ARGUMENTS, f"run.dir={run_dir}", f"train.steps={2 * STEPS}"]
        command += ["task.pause_s=0.02", "checkpoint.max_failed_saves=100", f"checkpoint.memory_dir={tmp_path}"]
        process = subprocess.Popen(
            last_wins(command), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            wait_until(lambda: bool(events(run_dir, "checkpoint_failed")), timeout_s=60, what="a failed save")
            os.unlink(filler)  # noqa: PTH108
            output, _ = process.communicate(timeout=200)
        finally:
            process.kill()
        assert process.returncode == 0, output
        assert "No space left on device; free space" in output
        assert events(run_dir, "checkpoint_saved")[-1]["step"] == 2 * STEPS
        assert sorted(losses(run_dir)) == list(range(1, 2 * STEPS + 1))
        wait_until(lambda: not savers(tmp_path), timeout_s=60, what="end of the saver")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@contextmanager
def moto_server() -> Iterator[str]:
    """Another service that speaks S3: a mock, but with rules of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(answers, timeout_s=60, what="moto")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


def test_moto_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    with moto_server() as endpoint:
        for name, value in environment_for(endpoint).items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        arguments = (f"train.steps={STEPS}", "task.pause_s=0.01")
        code, output = run("s3://bucket/run", *arguments, endpoint=endpoint, folder=tmp_path)
        assert code == 0, output
        run_dir = bring(open_store("s3://bucket/run"), tmp_path / "copy")
        assert events(run_dir, "checkpoint_saved")[-1]["step"] == STEPS
