"""A saver's life: it is stopped, killed, cannot start, hears nonsense, outlives its run, and never has company."""

import json
import os
import random
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import psutil
from faultyruns import ARGUMENTS, FACTS, STEPS, Fault, check_nothing_left, kill_everything, launched, with_faults
from torchruns import alone, events, kill, last_step, losses, savers, torchrun, wait_until

from elastictrain.checkpoint.memory.folder import look


def arguments(run_dir: Path, *more: str) -> list[str]:
    return [*ARGUMENTS, f"train.steps={STEPS}", f"run.dir={run_dir}", *more]


def one_rank(run_dir: Path, *more: str, **options: object):
    return launched(arguments(run_dir, *more), world_size=1, folder=run_dir.parent, **options)


def the_saver(tmp_path: Path) -> psutil.Process:
    wait_until(lambda: len(savers(tmp_path)) == 1, what="one saver")
    return savers(tmp_path)[0]


def at_step(run_dir: Path, step: int) -> None:
    wait_until(lambda: last_step(run_dir) >= step, what=f"step {step}")


def test_killed_three_times_in_a_row(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    with one_rank(run_dir, "task.pause_s=0.02") as run:
        killed = set()
        for count in range(3):
            at_step(run_dir, 4 * count + 2)
            saver = the_saver(tmp_path)
            wait_until(lambda pid=saver.pid: any(row["pid"] == pid for row in events(run_dir, "keeper_started")))
            killed.add(saver.pid)
            kill(saver)
            wait_until(lambda gone=saver: gone not in savers(tmp_path), what="its end")
        assert run.wait() == 0, run.output()
    assert {row["pid"] for row in events(run_dir, "keeper_lost")} == killed
    assert "3 times" in run.output()
    assert losses(run_dir) == undisturbed
    assert events(run_dir, "checkpoint_saved")[-1]["step"] == STEPS
    check_nothing_left(tmp_path)


def test_not_startable_at_all(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    code, output = alone(
        arguments(run_dir),
        folder=run_dir.parent,
        extra_environment=with_faults([Fault(FACTS, "exit", always=True)], tmp_path / "f"),
    )
    assert code == 0, output
    assert "synchronous" in output
    assert "on purpose" in output
    assert losses(run_dir) == undisturbed
    assert [row["step"] for row in events(run_dir, "checkpoint_saved")] == [6, 12, 18, 24, 30, 36, 40]
    assert not events(run_dir, "snapshot")


def test_what_was_kept_is_read_without_a_saver(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    with one_rank(run_dir, "task.pause_s=0.05", "checkpoint.every_steps=100") as run:
        at_step(run_dir, 8)
        kill_everything(run, the_saver(tmp_path))
    code, output = alone(
        arguments(run_dir),
        folder=run_dir.parent,
        extra_environment=with_faults([Fault(FACTS, "exit", always=True)], tmp_path / "f"),
    )
    assert code == 0, output
    resumed = events(run_dir, "resume")[-1]
    assert (resumed["tier"], resumed["step"] >= 4) == ("memory", True), resumed
    # Nobody would save it later.
    assert events(run_dir, "checkpoint_saved")[0]["step"] == resumed["step"]
    assert losses(run_dir) == undisturbed
    check_nothing_left(tmp_path)


def test_a_stopped_saver_does_not_stop_training(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    with one_rank(run_dir, "task.pause_s=0.03") as run:
        at_step(run_dir, 8)
        saver = the_saver(tmp_path)
        saver.suspend()
        before = last_step(run_dir)
        at_step(run_dir, 30)
        assert before < 20
        saver.resume()
        assert run.wait() == 0, run.output()
    assert losses(run_dir) == undisturbed
    assert not events(run_dir, "keeper_lost")
    check_nothing_left(tmp_path)


def test_a_stopped_saver_does_not_hold_up_the_end_in_silence(tmp_path: Path) -> None:
    run_dir = tmp_path / "job/run"
    unsaved = ("checkpoint.every_steps=0", "checkpoint.snapshot_every_steps=0", "train.steps=4")
    with one_rank(run_dir, "task.pause_s=0.2", *unsaved) as run:
        at_step(run_dir, 1)
        saver = the_saver(tmp_path)
        saver.suspend()
        wait_until(lambda: f"kill -CONT {saver.pid}" in run.output(), timeout_s=30, what="word of the saver")
        assert run.process.poll() is None
        saver.resume()
        assert run.wait(60) == 0, run.output()
    assert [row["step"] for row in events(run_dir, "checkpoint_saved")] == [4]
    check_nothing_left(tmp_path)


def test_every_rank_ends_with_the_error_of_storage(tmp_path: Path) -> None:
    run_dir = tmp_path / "job/run"
    often = ("checkpoint.every_steps=2", "train.steps=100000", "task.pause_s=0.02")
    with torchrun(arguments(run_dir, *often), world_size=2, folder=run_dir.parent) as run:
        wait_until(lambda: bool(events(run_dir, "checkpoint_saved")), what="a checkpoint")
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        while not (run_dir / "checkpoints").is_file():
            # A save that was under way may have made it again.
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
            with suppress(FileExistsError):
                (run_dir / "checkpoints").touch(exist_ok=False)
        assert run.wait(60) == 1, run.output()
    failures = {row["rank"]: row for row in events(run_dir, "failure")}
    last = max(events(run_dir, "checkpoint_failed"), key=lambda row: row["in_a_row"])
    assert {rank: row["exit_code"] for rank, row in failures.items()} == {0: 74, 1: 74}
    assert all(last["error"] in row["error"] for row in failures.values()), failures
    (run_dir / "checkpoints").unlink()
    wait_until(lambda: not savers(tmp_path), timeout_s=60, what="the end of the saver")


def speak(tmp_path: Path, data: bytes) -> bytes:
    """To the saver; returns what it answers before it hangs up or falls silent."""
    (path,) = (tmp_path / "host-memory").glob("*/*/keeper.sock")
    folder = os.open(path.parent, os.O_RDONLY)
    heard = b""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        client.connect(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                heard += piece
        except OSError:
            pass
    return heard


HUGE = 10**400
NONSENSE = [
    b"\n" * 1000,
    b"\0" * 5000 + b"\n",
    b"[" * 100_000 + b"\n",
    b'{"op": ' * 10_000 + b"\n",
    b"x" * (3 << 20),
    b'"hello"\n',
    b'{"op": 7}\n',
    b'{"op": "nonsense"}\n',
    b'{"op": "\\ud800"}\n',
    b'{"op": "snapshot", "slot": 0, "step": 4}\n',
    b'{"op": "hello"}\n',
    b'{"op": "hello", "rank": 0, "ranks": [], "world_size": 1, "incarnation": "000001-x", "host": "h", "agent": 1}\n',
    b'{"op": "hello", "rank": true, "ranks": [0], "world_size": 1, "incarnation": "9", "host": "h", "agent": 1}\n',
    b'{"op": "hello", "rank": 9, "ranks": [9], "world_size": 1, "incarnation": "9", "host": "h", "agent": 1}\n',
    b'{"op": "hello", "rank": 0, "ranks": [0], "world_size": 1, "incarnation": "0", "host": "h", "agent": 1}\n',
    b'{"op": "hello", "rank": 0, "ranks": [0], "world_size": -1, "incarnation": "0", "host": "h", "agent": 1}\n',
    f'{{"op": "step", "micros": {HUGE}}}\n'.encode(),
    f'{{"op": "old", "slots": {HUGE}}}\n'.encode(),
    b'{"op": "old", "slots": 0}\n',
    b'{"op": "old", "slots": -1}\n',
    b'{"op": "step", "micros": 1e400}\n',
    b'{"op": "finish"}\n',
    b'{"op": "replicate"}\n',
    b'{"op": "roster"}\n',
    b'{"op": "bye"}\n',
]


def test_nonsense_on_its_socket(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    chance = random.Random(1)
    with one_rank(run_dir, "task.pause_s=0.03") as run:
        saver = the_saver(tmp_path)
        at_step(run_dir, 8)
        for data in [*NONSENSE, *(chance.randbytes(chance.randrange(1, 5000)) for _ in range(30))]:
            speak(tmp_path, data)
            assert savers(tmp_path) == [saver], data[:200]
        hello = {"op": "hello", "rank": 0, "ranks": [0], "world_size": 1, "host": "h", "address": "", "port": 0}
        hello["incarnation"] = events(run_dir, "start")[0]["incarnation"]
        for agent in (0, 1 << 31, 1 << 62, HUGE):
            # It hangs up without a word, and is not taken for dead: this process lives.
            speak(tmp_path, json.dumps(hello | {"agent": agent}).encode() + b"\n")
            assert savers(tmp_path) == [saver], agent
        assert run.wait() == 0, run.output()
    assert not events(run_dir, "keeper_lost")
    assert losses(run_dir) == undisturbed
    check_nothing_left(tmp_path)


def test_everybody_killed_is_flushed(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    with torchrun(arguments(run_dir, "checkpoint.every_steps=0"), world_size=2, folder=run_dir.parent) as run:
        at_step(run_dir, 14)
        saver = the_saver(tmp_path)
        # What is in memory when they die is looked at before anything of it is written.
        saver.suspend()
        kill_everything(run)
    steps: dict[int, set[int]] = {0: set(), 1: set()}
    (lock,) = (tmp_path / "host-memory").glob("*/*/keeper.lock")
    for held in look(str(lock.parent), host=0):
        steps[held.facts.rank].add(held.facts.step)
    saver.resume()
    check_nothing_left(tmp_path)
    (saved,) = events(run_dir, "checkpoint_saved")
    assert saved["reason"] == "flush"
    assert saved["step"] == max(steps[0] & steps[1])
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == [saved["checkpoint"]]


def test_a_deleted_run_is_not_recreated(tmp_path: Path) -> None:
    run_dir = tmp_path / "job/run"
    with one_rank(run_dir, "task.pause_s=0.01") as run:
        at_step(run_dir, 4)
        saver = the_saver(tmp_path)
        saver.suspend()
        at_step(run_dir, 9)
        kill_everything(run)
        shutil.rmtree(run_dir)
        saver.resume()
    check_nothing_left(tmp_path)
    assert not run_dir.exists(), sorted(run_dir.rglob("*"))
