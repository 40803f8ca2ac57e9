"""One host's launcher, real processes: what ends, what goes on, and what is said."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from torchruns import (
    TINY,
    Run,
    environment,
    events,
    kill,
    last_step,
    losses,
    memory_arguments,
    savers,
    started,
    train,
    wait_until,
)

from elastictrain.data.ledger import read_ledger
from elastictrain.liveness.monitor_client import default_parent
from elastictrain.storage.opening import open_store

STEPS = 40
ARGUMENTS = (*TINY, f"train.steps={STEPS}", "train.eval_every_steps=0", "checkpoint.every_steps=10", "launch.processes=2")
PACED = ("task._target_=tests.process.paced.PacedLlama", "task.pause_s=0.05")
QUICK = ("launch.poll_s=0.2", "launch.lost_s=2", "launch.backoff_s=0.1", "launch.notices=false")


@contextmanager
def launched(
    arguments: Sequence[str],
    *,
    folder: Path,
    name: str = "launch",
    inside: Sequence[str] = (),
    extra_environment: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*ARGUMENTS, *QUICK, *arguments, f"run.dir={folder}/run"]
    command = [*inside, sys.executable, "-m", "elastictrain.launch", *arguments, *memory_arguments(arguments, folder)]
    with started(command, log=folder / f"{name}.txt", extra_environment=extra_environment or {}) as run:
        yield run


def exit_line(output: str) -> str:
    """The launcher's last line but the one with figures of the run."""
    return output.splitlines()[-2]


def launcher_of(pid: int) -> psutil.Process:
    """The launcher, which is a child where a namespace was made for it."""
    family = [psutil.Process(pid), *children_of(pid)]
    return next(one for one in family if "elastictrain.launch" in one.cmdline() and "unshare" not in one.cmdline())


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def all_gone(family: Sequence[psutil.Process]) -> bool:
    return not any(lives(one) for one in family)


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def generations(folder: Path) -> list[dict[str, object]]:
    paths = sorted((folder / "run" / "launch" / "generations").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    train([*ARGUMENTS, f"run.dir={folder}/run"], world_size=2, folder=folder)
    return losses(folder / "run")


def test_a_killed_worker_costs_a_generation_and_nothing_else(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "run"
    with launched((*PACED, f"launch.log_dir={tmp_path}/logs"), folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 12, what="step 12")
        # Forks of a process that has imported all: a restart waits for no import.
        assert [worker.name() for worker in run.workers()] == ["rank 0", "rank 1"]
        survivor, dead = (worker.pid for worker in run.workers())
        kill(run.workers()[1])
        # The saver and the launcher are those of the first generation until the end.
        assert run.wait(90) == 0, run.output()
        output = run.output()
    assert losses(run_dir) == undisturbed
    assert [row["outcome"] for row in generations(tmp_path)] == ["run", "run", "done"]
    (failed, done) = events(run_dir, "generation_ended")
    assert (failed["kind"], failed["exit_code"], done["kind"]) == ("failed", 137, "done")
    assert "SIGKILL" in output
    assert str(run_dir) in exit_line(output)
    (log,) = (tmp_path / "logs").iterdir()
    *printed, last = log.read_text().splitlines()
    assert sorted(printed) == sorted(output.splitlines())
    assert last == "elastictrain: exit code 0"
    assert [row["tier"] for row in events(run_dir, "resume")] == ["none", "memory"]
    # The other worker is the same process, and trains on in it.
    (recovery,) = events(run_dir, "recovery")
    assert (recovery["rung"], recovery["world_size"]) == ("in_place", 2)
    assert [lost.partition(" on ")[0] for lost in recovery["lost"]] == ["rank 1"]
    assert recovery["pids"]["0"] == survivor
    assert recovery["pids"]["1"] not in (survivor, dead)
    assert [row["pids"] for row in events(run_dir, "start")] == [{"0": survivor, "1": dead}, recovery["pids"]]
    resumed = events(run_dir, "resume")[1]["step"]
    assert recovery["resumed_step"] == resumed
    assert 0 <= recovery["steps_repeated"] <= STEPS
    assert 0 < recovery["seconds"]["first_step"] < recovery["seconds"]["total"]
    assert [row["event"] for row in events(run_dir) if row["rank"] == -1] == [
        "launcher_started",
        *["generation", "generation_ended"] * 2,
        "launcher_ended",
    ]
    entry = json.loads(next((run_dir / "launch" / "hosts").glob("*.json")).read_text())
    assert entry["state"] == "gone"


def test_a_worker_that_hangs_is_replaced_and_the_other_stays(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "run"
    hang = (
        "task._target_=tests.process.hanging.HangingLlama",
        "task.how=sleep",
        "task.at_pass=40",
        f"task.once={tmp_path}/once",
    )
    with launched((*hang, "task.pause_s=0.05", "fault.hang_floor_s=3", "fault.heartbeat_s=0.2"), folder=tmp_path) as run:
        assert run.wait(120) == 0, run.output()
    assert losses(run_dir) == undisturbed
    (found,), (recovery,) = events(run_dir, "hang"), events(run_dir, "recovery")
    assert [name.partition(" on ")[0] for name in found["guilty"]] == ["rank 1"]
    assert recovery["lost"] == found["guilty"]
    assert recovery["rung"] == "in_place"
    before, after = (row["pids"] for row in events(run_dir, "start"))
    assert after["0"] == before["0"]
    assert after["1"] != before["1"]


ANOTHER_THREAD = """
import sys, threading, time
if "elastictrain.launch.fork_server" in sys.orig_argv:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def test_workers_that_cannot_be_forks_are_told_of(tmp_path: Path) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text(ANOTHER_THREAD)
    extra = {"PYTHONPATH": os.pathsep.join([str(path), environment()["PYTHONPATH"]])}
    with launched(["train.steps=12"], folder=tmp_path, extra_environment=extra) as run:
        assert run.wait(120) == 0, run.output()
    (told,) = events(run_dir, "workers_not_forked")
    assert "threads" in told["reason"]
    assert told["reason"] in run.output()


def test_nothing_of_a_generation_stays_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    run_dir, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()

    def names() -> set[str]:
        return {re.sub(r"none_\w+", "RUN", str(path.relative_to(temporary))) for path in temporary.rglob("*")}

    def marks() -> list[Path]:
        """Folders in host memory of this run's incarnations."""
        incarnations = {path.name.rpartition("-r")[0] for path in (run_dir / "events").glob("*-r*")}
        return [path for path in Path(default_parent()).glob("*") if path.name.rpartition("-r")[0] in incarnations]

    arguments = [*PACED, "train.steps=1000000", "checkpoint.every_steps=5"]
    after: list[set[str]] = []
    with launched(arguments, folder=tmp_path, extra_environment={"TMPDIR": str(temporary)}) as run:
        for restart in range(6):
            step = last_step(run_dir) + 6
            wait_until(lambda least=step: last_step(run_dir) >= least, what="steps")  # type: ignore[misc]
            after.append(names())
            # The watcher of the workers that were killed removes theirs a moment later.
            wait_until(lambda: len(marks()) == 1, what="the end of the watcher before")
            if restart < 5:
                kill(run.workers()[0])
        run.process.terminate()
        assert run.wait(90) == 75, run.output()
    # The first start of torch makes a folder for its compiler.
    assert after[1:] == [after[1]] * 5, after
    wait_until(lambda: not marks(), what="the end of the watcher")


def test_a_killed_fork_server_takes_its_workers_with_it_before_the_next_one_starts(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    run_dir = tmp_path / "run"
    with launched(PACED, folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 12, what="step 12")
        workers = run.workers()
        server = workers[0].parent()
        assert server is not None
        kill(server)
        wait_until(lambda: len(events(run_dir, "start")) == 2, what="the second start")
        # They would save, and hold their devices meanwhile.
        assert all_gone(workers)
        assert run.wait(90) == 0, run.output()
    assert [row["exit_code"] for row in events(run_dir, "generation_ended")] == [137, 0]
    assert losses(run_dir) == undisturbed


def test_asked_to_stop_it_saves_and_the_same_command_goes_on(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "run"
    with launched(PACED, folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 5, what="step 5")
        family = children_of(run.process.pid)
        run.process.terminate()
        assert run.wait(60) == 75, run.output()
        stopped_at = last_step(run_dir)
        assert f"step {stopped_at}" in exit_line(run.output())
        wait_until(lambda: all_gone(family), what="the end of all processes")
    with launched(PACED, folder=tmp_path, name="again") as run:
        assert run.wait(90) == 0, run.output()
    assert [row["step"] for row in events(run_dir, "resume")] == [0, stopped_at]
    assert losses(run_dir) == undisturbed
    assert [row["outcome"] for row in generations(tmp_path)] == ["run", "run", "done"]


def test_it_stays_until_storage_has_what_its_workers_left_in_memory(tmp_path: Path) -> None:
    run_dir, memory = tmp_path / "run", tmp_path / "host-memory"
    memory.mkdir()
    # Nothing is saved before it is asked to stop, and then it waits for 9 s of the 12.
    unsaved = ["checkpoint.every_steps=0", "checkpoint.snapshot_every_steps=0", "train.steps=100000"]
    options = [*unsaved, "fault.notice_s=12", "fault.shutdown_grace_s=6"]
    with launched([*PACED, *options, f"checkpoint.memory_dir={memory}"], folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 3, what="step 3")
        (saver,) = savers(tmp_path)
        # Storage that does not answer: nobody but the saver asks it for anything now.
        saver.suspend()
        try:
            run.process.terminate()
            wait_until(lambda: not children_of(run.process.pid), what="the end of the workers")
            (stop,) = events(run_dir, "stop")
            assert (stop["saved"], stop["saved_step"]) == ("memory", stop["step"])
            assert not list(run_dir.glob("checkpoints/*/manifest.json"))
            time.sleep(0.5)
            assert run.process.poll() is None, run.output()
        finally:
            saver.resume()
        assert run.wait(30) == 75, run.output()
    assert f"step {stop['step']}" in exit_line(run.output())
    wait_until(lambda: not savers(tmp_path), what="the end of the saver")


IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""The launcher is process 1 of a namespace of its own: all that is left ends with it."""


@pytest.mark.parametrize(("slow", "inside"), [(True, ()), (False, IN_A_CONTAINER)], ids=["slow storage", "container"])
def test_a_stop_after_all_workers_were_killed_waits_for_the_saver(slow: bool, inside: tuple[str, ...], tmp_path: Path) -> None:
    if inside and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a namespace of processes")
    run_dir, memory = tmp_path / "run", tmp_path / "host-memory"
    memory.mkdir()
    # Nothing is in storage, and a snapshot in memory.
    unsaved = ["checkpoint.every_steps=0", "checkpoint.snapshot_every_steps=4", "train.steps=100000", "fault.notice_s=40"]
    with launched([*PACED, *unsaved, f"checkpoint.memory_dir={memory}"], folder=tmp_path, inside=inside) as run:
        wait_until(lambda: bool(events(run_dir, "snapshot")), what="a snapshot")
        (saver,) = savers(tmp_path)
        if slow:
            # As a disk that takes its time.
            saver.suspend()
        workers, launcher = run.workers(), launcher_of(run.process.pid)
        for disturb in (psutil.Process.suspend, psutil.Process.kill):
            for worker in workers:
                disturb(worker)
        if not slow:
            wait_until(lambda: bool(events(run_dir, "generation_ended")), what="the end of the generation")
        launcher.terminate()
        if slow:
            # Inside the namespace it has another number.
            wait_until(lambda: "kill -CONT" in run.output(), timeout_s=30, what="word of the saver")
            assert run.process.poll() is None
            saver.resume()
        assert run.wait(60) == 75, run.output()
    (saved,) = events(run_dir, "checkpoint_saved")
    # Unless new workers train again by then, and save when they are asked to stop.
    assert saved["reason"] in ("flush", "stop")
    assert saved["step"] >= max(row["step"] for row in events(run_dir, "snapshot"))
    assert f"step {saved['step']}" in exit_line(run.output())
    wait_until(lambda: not savers(tmp_path), what="the end of the saver")


def test_a_killed_launcher_leaves_nothing_running(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched([*PACED, "train.steps=100000"], folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 3, what="step 3")
        family = children_of(run.process.pid)
        assert len(family) >= 3
        os.kill(run.process.pid, signal.SIGKILL)
        wait_until(lambda: all_gone(family), timeout_s=30, what="the end of all processes")
    memory = tmp_path.parent / "host-memory"
    wait_until(lambda: not list(memory.rglob("own-*")), timeout_s=30, what="an empty host memory")


def test_what_cannot_be_mended_is_not_tried_again(tmp_path: Path) -> None:
    # Only the worker imports the task, and finds out.
    with launched(["task._target_=tests.process.paced.NoSuchLlama"], folder=tmp_path) as run:
        assert run.wait(60) == 78
        output = run.output()
    assert output.count("NoSuchLlama") <= 3
    assert "Traceback" not in output
    (ended,) = events(tmp_path / "run", "launcher_ended")
    assert ended["exit_code"] == 78
    assert "NoSuchLlama" in ended["reason"]
    assert [row["outcome"] for row in generations(tmp_path)] == ["run", "give up"]


def test_a_mistake_in_the_task_ends_the_run_once(tmp_path: Path) -> None:
    with launched(["task._target_=tests.process.failing.MistakenLlama"], folder=tmp_path) as run:
        assert run.wait(60) == 78, run.output()
        output = run.output()
    assert "Traceback" not in output
    (ended,) = events(tmp_path / "run", "launcher_ended")
    assert ended["exit_code"] == 78
    assert "MistakenLlama.loss (" in ended["reason"]
    assert [row["outcome"] for row in generations(tmp_path)] == ["run", "give up"]


def test_a_crash_loop_ends_with_its_reasons(tmp_path: Path) -> None:
    began = time.monotonic()
    failing = ["task._target_=tests.process.failing.FailingLlama", "task.fails_at=8", "checkpoint.snapshot_every_steps=0"]
    # A standby takes a step of its own, which the task would count.
    failing.append("launch.standbys=0")
    with launched([*failing, "launch.processes=1"], folder=tmp_path) as run:
        assert run.wait(120) == 70, run.output()
        output = run.output()
    (ended,) = events(tmp_path / "run", "launcher_ended")
    assert ended["exit_code"] == 70
    assert "3 times" in ended["reason"]
    assert output.count("ZeroDivisionError") >= 3
    assert "step 2" in ended["reason"]
    assert [len(row["failures"]) for row in generations(tmp_path)] == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert time.monotonic() - began < 120


def test_what_is_poisoned_is_got_past(tmp_path: Path) -> None:
    """The batch of step 18 is skipped, as in a run that leaves out its update; and the run goes back from snapshots
    after step 10 to a checkpoint before."""
    task = "task._target_=tests.process.poisoned.PoisonedLlama"
    alike = [task, "train.steps=20", "checkpoint.every_steps=5", "data.ledger=true", f"task.mark={tmp_path}/mark"]
    single = ["launch.processes=1", "launch.standbys=0", "fault.on_poisoned=skip"]
    train(
        [*ARGUMENTS, *alike, "task.how=not_finite", "task.at_pass=70", f"run.dir={tmp_path}/by-hand"],
        world_size=1,
        folder=tmp_path,
    )
    expected = losses(tmp_path / "by-hand")
    assert expected.pop(18) is None

    with launched([*alike, *single, "task.how=batch"], folder=tmp_path / "skip") as run:
        assert run.wait(90) == 0, run.output()
    run_dir = tmp_path / "skip" / "run"
    assert losses(run_dir) == expected
    assert {row["lr"] for row in events(run_dir, "step")} < {row["lr"] for row in events(tmp_path / "by-hand", "step")}
    assert [(row["step"], row["positions"]) for row in events(run_dir, "step_skipped")] == [(18, [136, 144])]
    rows = list(read_ledger(open_store(str(run_dir))))
    assert {row.step for row in rows if row.skipped} == {18}
    assert {tuple(row.each_position) for row in rows if row.skipped} == {tuple(range(136, 144))}
    skipped = [row["poisoned"]["skipped"] for row in generations(tmp_path / "skip")]  # type: ignore[index]
    # A newer snapshot may count as progress between the first failures.
    assert len(skipped) >= 5
    assert skipped == [[]] * (len(skipped) - 2) + [[18], [18]]

    single[-1] = "fault.on_poisoned=back"
    # So that there is a snapshot after step 10 when it fails.
    single += ["task.how=state", "task.at_pass=53", "task.from_step=10", "checkpoint.snapshot_every_steps=2"]
    with launched([*alike, *single], folder=tmp_path / "back") as run:
        assert run.wait(90) == 0, run.output()
    run_dir = tmp_path / "back" / "run"
    assert {step: loss for step, loss in losses(run_dir).items() if step < 18} == {
        step: loss for step, loss in expected.items() if step < 18
    }
    # A checkpoint of step 10 that was not written in time makes that of step 5 the newest one, if memory has no older snapshot.
    assert events(run_dir, "resume")[-1]["step"] in (0, 5, 6, 8)


def test_a_wrong_configuration_is_told_before_anything_starts(tmp_path: Path) -> None:
    with launched(["launch.max_hosts=1", "launch.min_hosts=2"], folder=tmp_path) as run:
        assert run.wait(30) == 78
        assert "`launch.max_hosts`" in run.output()
    assert not (tmp_path / "run").exists()
