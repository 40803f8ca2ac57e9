"""Notices with deadlines, whatever a run is doing then: state is saved, the reason is told, and the next start goes on."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "saver"))

from faultyruns import COMMIT, Fault, check_nothing_left, fired, with_faults
from test_stop import ARGUMENTS, SOON_S, last_stop, wait_for_end
from torchruns import REPOSITORY, Run, events, torchrun, wait_until

REASON = "SIGTERM"
RESTORE = Fault("elastictrain.checkpoint.checkpointer:Checkpointer.restore", "pause")
RESTORED = Fault(RESTORE.at, "pause", "after")
PREFLIGHT = Fault("elastictrain.preflight.host_preflight:HostPreflight.check", "pause")
COMPILE = Fault("elastictrain.train.step:Stepper._pass", "pause")
STEP = Fault("elastictrain.train.step:Stepper._pass", "pause", nth=21)
EVAL = Fault("elastictrain.train.evaluate:Evaluator.run", "pause", nth=2)
SAVE = Fault(COMMIT, "pause")

STEPS_MORE = {STEP: 13, COMPILE: 1, EVAL: 4, RESTORE: 0, SAVE: 10_000}
"""At most, from where a run went on to where it stops: two more than the step at hand, unless nothing is under way."""


@contextmanager
def stopped(
    fault: Fault, *arguments: str, run_dir: Path, folder: Path, within_s: float, at_mark: Callable[[], None] = lambda: None
) -> Iterator[tuple[Run, float]]:
    """A run of two ranks that was given notice when it reached `fault`, and the seconds from there to its end."""
    folder.mkdir(parents=True)
    extra = with_faults([fault], folder / "faults")
    command = [*ARGUMENTS, *arguments, f"run.dir={run_dir}", f"checkpoint.memory_dir={memory_of(run_dir)}"]
    command += [f"fault.notice_s={within_s}", f"fault.shutdown_grace_s={min(20.0, 0.8 * within_s)}"]
    with torchrun(command, world_size=2, folder=folder, extra_environment=extra) as run:
        wait_until(lambda: fired(folder / "faults") == 1, timeout_s=120, what=fault.at)
        at_mark()
        workers, began_s = run.workers(), time.monotonic()
        assert len(workers) == 2
        run.process.terminate()
        wait_for_end(workers)
        ended_s = time.monotonic() - began_s
        run.wait(SOON_S)
        yield run, ended_s


def saved_steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in events(run_dir, "checkpoint_saved")]


def memory_of(run_dir: Path) -> Path:
    memory = run_dir.parent / "host-memory"
    memory.mkdir(parents=True, exist_ok=True)
    return memory


MOMENTS = (STEP, COMPILE, EVAL, RESTORE, SAVE, PREFLIGHT)
PAIRS = [(120.0, MOMENTS[:2]), (30.0, MOMENTS[2:4]), (5.0, MOMENTS[4:])]


@pytest.mark.parametrize(
    ("within_s", "faults"), [(within_s, MOMENTS) for within_s, _ in PAIRS] if os.environ.get("EVERY_DEADLINE") else PAIRS
)
def test_notice_to_saved(within_s: float, faults: tuple[Fault, ...], tmp_path: Path) -> None:
    """One run is stopped again and again, each time somewhere else: no step is lost, and none is done twice.

    With EVERY_DEADLINE=1 in the environment each moment comes with each deadline, which takes minutes.
    """
    run_dir, went_on_from = tmp_path / "run", 0
    for number, fault in enumerate(faults):
        options = ["preflight=quick"] if fault is PREFLIGHT else []
        options += ["train.eval_every_steps=2"] if fault is EVAL else []
        folder = tmp_path / f"start-{number}"
        with stopped(fault, *options, run_dir=run_dir, folder=folder, within_s=within_s) as (run, ended_s):
            output = run.output()
        assert ended_s < min(within_s, SOON_S), output
        # torchrun shows a traceback of its own; ours would name our files.
        assert f'File "{REPOSITORY}/elastictrain' not in output
        if fault is PREFLIGHT:
            # Nothing is agreed on yet: each rank leaves when it hears of it, and whoever does not is ended by its host.
            told = {(row["exit_code"], f"({REASON})" in row["error"]) for row in events(run_dir, "failure")}
            assert told == {(75, True)}
            continue
        assert events(run_dir, "resume")[-1]["step"] == went_on_from
        stop = events(run_dir, "stop")[-1]
        assert (stop["exit_code"], stop["reason"]) == (75, REASON)
        assert (stop["saved"], stop["saved_step"]) == ("storage", stop["step"])
        (said,) = (line for line in output.splitlines() if f"({REASON}) after" in line)
        assert [part in said for part in (f"step {stop['step']},", str(run_dir))] == [True] * 2
        assert 0 <= stop["step"] - went_on_from <= STEPS_MORE[fault]
        went_on_from = stop["step"] if fault is RESTORE else last_stop(run_dir)
    assert [row["step"] for row in events(run_dir, "step")] == list(range(1, went_on_from + 1))


def test_storage_that_is_too_slow_leaves_the_step_in_memory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = Fault(COMMIT, "hold")
    with stopped(slow, run_dir=run_dir, folder=tmp_path / "start-0", within_s=5.0) as (
        run,
        ended_s,
    ):
        output = run.output()
    # It waited for storage as long as there was time, and was gone before its host.
    assert 2.0 < ended_s < 5.0, output
    (stop,) = events(run_dir, "stop")
    assert (stop["exit_code"], stop["saved"], stop["saved_step"]) == (75, "memory", stop["step"])
    (said,) = (line for line in output.splitlines() if f"({REASON}) after" in line)
    assert [part in said for part in (f"step {stop['step']},", "memory", "storage")] == [True] * 3
    assert not list(run_dir.glob("checkpoints/*/manifest.json"))
    # The saver goes on as long as the host lives.
    (tmp_path / "start-0" / "faults" / "go").touch()
    wait_until(lambda: saved_steps(run_dir)[-1:] == [stop["step"]], what="the checkpoint of the saver")
    check_nothing_left(tmp_path)


def test_the_next_start_finds_in_memory_what_storage_does_not_have_yet(tmp_path: Path) -> None:
    run_dir, go = tmp_path / "run", tmp_path / "start-0" / "faults" / "go"
    with stopped(Fault(COMMIT, "hold"), run_dir=run_dir, folder=tmp_path / "start-0", within_s=5.0):
        pass
    (stop,) = events(run_dir, "stop")
    # It is asked to stop again while it restores, and storage is there again.
    with stopped(RESTORED, run_dir=run_dir, folder=tmp_path / "start-1", within_s=30.0, at_mark=go.touch) as (run, _):
        output = run.output()
    resumed, again = events(run_dir, "resume")[-1], events(run_dir, "stop")[-1]
    assert (resumed["step"], resumed["tier"]) == (stop["step"], "memory"), output
    assert (again["saved"], again["saved_step"]) == ("storage", stop["step"]), output
    assert saved_steps(run_dir)[-1] == stop["step"]
    assert len(events(run_dir, "step")) == stop["step"]
    check_nothing_left(tmp_path)
