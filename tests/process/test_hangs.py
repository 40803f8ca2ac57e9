"""A rank that hangs, whatever it holds: the guilty one is named within its bound, and the run goes on."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from torchruns import TINY, Run, events, kill, last_step, losses, torchrun, train, wait_until

from elastictrain.bounded_json import encode_record
from elastictrain.liveness.monitor_client import MonitoredHost

STEPS = 30
HANGS_IN_STEP = 14
"""A bound is learnt from ten steps."""

FLOOR_S = 3.0
SOON_S = 3.0
"""From its bound to its name: a turn, a second for stacks, and a slow machine."""

HEARTBEAT_S = 0.2

ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.hanging.HangingLlama",
    "train.global_batch=4",
    "task.pause_s=0.03",
    f"train.steps={STEPS}",
    "checkpoint.every_steps=5",
    "train.eval_every_steps=0",
    f"fault.heartbeat_s={HEARTBEAT_S}",
    f"fault.hang_floor_s={FLOOR_S}",
    "fault.step_timeout_s=40",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    output = train([*ARGUMENTS, f"run.dir={folder}/run"], world_size=2, folder=folder)
    assert "hang" not in output
    assert not events(folder / "run", "hang")
    return losses(folder / "run")


def watchers() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if "elastictrain.liveness" in (one.info["cmdline"] or [])]


def data_worker(run: Run, rank: int) -> psutil.Process:
    children = run.workers()[rank].children()
    (found,) = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    return found


def survive(
    folder: Path, undisturbed: dict[int, float], *extra: str, disturb: Callable[[Run], None] | None = None
) -> tuple[Path, str, float]:
    """A run that hangs once; returns its folder, its output, and when (unix time) it was disturbed from outside."""
    run_dir, disturbed_at = folder / "run", 0.0
    arguments = [*ARGUMENTS, *extra, f"run.dir={run_dir}"]
    with torchrun(arguments, world_size=2, folder=folder, max_restarts=1) as run:
        if disturb is not None:
            wait_until(lambda: last_step(run_dir) >= HANGS_IN_STEP, timeout_s=120, what=f"step {HANGS_IN_STEP}")
            disturbed_at = time.time()
            disturb(run)
        assert run.wait(150) == 0, run.output()[-6000:]
        output = run.output()
    assert losses(run_dir) == undisturbed
    assert len(events(run_dir, "start")) == 2
    return run_dir, output, disturbed_at


def check_hang(run_dir: Path, output: str, *, reason: str) -> dict[str, object]:
    (hang,) = events(run_dir, "hang")
    (name,) = hang["guilty"]
    assert re.fullmatch(r"rank 1 on \S+", name)
    assert name.endswith(hang["hosts"][0])
    assert hang["reason"] == reason
    assert FLOOR_S <= hang["bound_s"] < 10 * FLOOR_S
    # Who names another one knows of it from its last heartbeat.
    assert hang["bound_s"] - HEARTBEAT_S < hang["silent_s"] < hang["bound_s"] + SOON_S
    assert [waiting.partition(" on ")[0] for waiting in hang["waiting"]] == ["rank 0"]
    assert hang["text"] in output
    stacks = (run_dir / hang["stacks"]).read_text()
    assert "rank 0, process" in stacks
    # A step has collectives in its passes, and in the comparison of replicas that begins with a snapshot.
    assert re.search(r"in (_pass|begin)\b", stacks), stacks
    return hang


def test_a_rank_that_sleeps_while_the_others_are_in_a_collective(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    once = tmp_path / "once"
    run_dir, output, _ = survive(tmp_path, undisturbed, "task.how=sleep", f"task.at_pass={HANGS_IN_STEP}", f"task.once={once}")
    hang = check_hang(run_dir, output, reason="did not enter")
    assert hang["phase"] == "backward"
    assert "all_reduce" in next(iter(hang["waiting"].values()))
    (collective,) = events(run_dir, "collective_fault")
    assert (collective["kind"], collective["culprits"]) == ("missing", hang["guilty"])
    assert collective["text"] in hang["text"]
    stacks = (run_dir / hang["stacks"]).read_text()
    assert "in _sleep" in stacks
    # The survivor is not waited for: it is gone before torchrun's half minute, and soon after the one that it waited for.
    (failure,) = [row for row in events(run_dir, "failure") if row["rank"] == 0]
    assert failure["time"] - hang["time"] < 2
    assert '"entries"' in (run_dir / failure["flight_recorder"]).read_text()


def test_a_rank_that_spins_with_the_interpreters_lock(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    once = tmp_path / "once"
    run_dir, output, _ = survive(tmp_path, undisturbed, "task.how=spin", f"task.at_pass={HANGS_IN_STEP}", f"task.once={once}")
    hang = check_hang(run_dir, output, reason="frozen")
    assert hang["phase"] == "forward"
    assert "interpreter's" in output
    stacks = (run_dir / hang["stacks"]).read_text()
    assert "re/__init__.py" in stacks


def test_a_rank_that_is_stopped(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir, output, at = survive(
        tmp_path, undisturbed, disturb=lambda run: run.workers()[1].send_signal(signal.SIGSTOP)
    )  # fmt: skip
    hang = check_hang(run_dir, output, reason="stopped")
    assert hang["time"] - at < hang["bound_s"] + SOON_S
    assert "stopped" in (run_dir / hang["stacks"]).read_text()


def test_a_data_worker_that_hangs(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir, output, _ = survive(
        tmp_path, undisturbed, "data.workers=1", "data.prefetch=1", disturb=lambda run: data_worker(run, 1).suspend()
    )
    hang = check_hang(run_dir, output, reason="behind")
    assert hang["phase"] == "data"
    assert re.search(r"its child \S+ \(\d+\) is stopped by a signal", (run_dir / hang["stacks"]).read_text())


def test_a_data_worker_that_is_killed(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir, output, at = survive(
        tmp_path, undisturbed, "data.workers=1", "data.prefetch=1", disturb=lambda run: kill(data_worker(run, 1))
    )
    assert not events(run_dir, "hang")
    (failure,) = [row for row in events(run_dir, "failure") if row["rank"] == 1]
    assert "SIGKILL" in failure["error"]
    assert failure["time"] - at < SOON_S
    assert re.search(r"rank 1 on \S+: .*SIGKILL", output)


def test_nothing_outlives_a_run_whose_processes_are_all_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    before = {one.pid for one in watchers()}
    arguments = [*ARGUMENTS, f"run.dir={run_dir}"]
    with torchrun(arguments, world_size=2, folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 2, what="step 2")
        (watcher,) = [one for one in watchers() if str(run_dir) in " ".join(one.cmdline())]
        folder = Path(watcher.cmdline()[-2])
        assert sorted(path.name for path in folder.iterdir() if path.suffix == ".marks") == ["r00000.marks", "r00001.marks"]
        workers = run.workers()
        run.process.kill()
        for one in workers:
            kill(one)
        wait_until(lambda: not watcher.is_running(), timeout_s=5, what="end of the watcher")
    assert not folder.exists()
    assert watcher.pid not in before


def test_a_monitor_starts_whatever_bytes_are_in_the_name_of_its_run(tmp_path: Path) -> None:
    facts = MonitoredHost("000001-aa", "b", (0,), f"{tmp_path}/\udcff", 1.0, 1.0)
    command = [sys.executable, "-m", "elastictrain.liveness", f"{tmp_path}/marks", encode_record(facts).decode()]
    (tmp_path / "marks").mkdir()
    # Nobody is there to be watched, so it ends by itself after ten seconds.
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
