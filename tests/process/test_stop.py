"""Ways to end a run, asked for or not: state is saved where it can be, every process leaves soon, and the reason is told."""

import re
import signal
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torchruns import REPOSITORY, TINY, events, kill, last_step, losses, started, torchrun, train, wait_until

ARGUMENTS = (
    *TINY,
    "train.steps=100000",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=20",
    "fault.heartbeat_s=0.2",
)
SOON_S = 10.0
"""What "within seconds" means on a machine that is busy with other tests."""

RUN = [sys.executable, "-m", "elastictrain.run"]


def wait_for_steps(run_dir: Path, number: int = 5) -> None:
    goal = last_step(run_dir) + number
    wait_until(lambda: last_step(run_dir) >= goal, what=f"step {goal}")


def wait_for_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SOON_S)
    assert not alive, f"{alive} did not end within {SOON_S:g} s"


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that inherited an environment variable with this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def last_stop(run_dir: Path) -> int:
    """The step at which the group stopped together; it is saved."""
    stop = events(run_dir, "stop")[-1]
    assert stop["exit_code"] == 75
    saved = events(run_dir, "checkpoint_saved")[-1]
    assert (saved["step"], saved["incarnation"]) == (stop["step"], stop["incarnation"])
    assert (run_dir / "checkpoints" / saved["checkpoint"] / "manifest.json").is_file()
    step: int = stop["step"]
    assert step == last_step(run_dir)
    return step


def test_a_group_stops_together_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """First torchrun is asked, then one worker alone: either way all save at one step, and nothing is done twice."""
    run_dir = tmp_path / "run"
    stopped = [0]
    for sent in (signal.SIGTERM, signal.SIGUSR1):
        with torchrun([*ARGUMENTS, f"run.dir={run_dir}"], world_size=2, folder=tmp_path / sent.name) as run:
            wait_for_steps(run_dir)
            workers = run.workers()
            assert len(workers) == 2
            (run.process if sent is signal.SIGTERM else workers[1]).send_signal(sent)
            wait_for_end(workers)
            run.wait(SOON_S)
            # torchrun shows a traceback of its own; ours would name our files.
            assert f'File "{REPOSITORY}/elastictrain' not in run.output()
        assert events(run_dir, "resume")[-1]["step"] == stopped[-1]
        stopped.append(last_stop(run_dir))
    assert sorted(losses(run_dir)) == list(range(1, stopped[-1] + 1))
    assert len(events(run_dir, "step")) == stopped[-1]
    assert not events(run_dir, "failure")


def test_a_world_of_one_stops_with_75_and_says_where(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started([*RUN, *ARGUMENTS, f"run.dir={run_dir}"], log=tmp_path / "log.txt") as run:
        wait_for_steps(run_dir)
        run.process.terminate()
        assert run.wait(SOON_S) == 75, run.output()
    (said,) = (line for line in run.output().splitlines() if "(SIGTERM) after" in line)
    assert [part in said for part in (f"step {last_stop(run_dir)},", str(run_dir))] == [True] * 2
    assert "Traceback" not in run.output()


def test_a_rank_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [*ARGUMENTS, "fault.step_timeout_s=3", f"run.dir={run_dir}"]
    with torchrun(arguments, world_size=2, folder=tmp_path, max_restarts=1) as run:
        wait_for_steps(run_dir, 25)
        healthy, hung = run.workers()
        hung.suspend()
        before = last_step(run_dir)
        began_s = time.monotonic()
        _, alive = psutil.wait_procs([healthy], timeout=3 + SOON_S)
        assert not alive
        assert time.monotonic() - began_s > 2
        (failure,) = events(run_dir, "failure")
        assert (failure["rank"], failure["exit_code"]) == (0, 71)
        ((name, heard),) = failure["last_heard"].items()
        assert name.startswith("rank 1 on ")
        assert re.fullmatch(r"(data|forward|backward|reduce|update) of step \d+(, micro-batch \d)?, [\d.]+ s ago", heard), heard
        # Beats are 0.2 s apart, and the last one is from before the rank was suspended.
        assert float(heard.split()[-3]) > 2
        assert failure["phase"] in ("forward", "backward", "reduce")
        kill(hung)
        wait_until(lambda: last_step(run_dir) > before + 1, what="more steps after the restart")
        assert events(run_dir, "resume")[-1]["step"] >= 20
    # The steps that were done again came out as before.
    losses(run_dir)


def test_no_worker_outlives_its_agent(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [*ARGUMENTS, "data.workers=1", f"run.dir={run_dir}"]
    with torchrun(arguments, world_size=2, folder=tmp_path) as run:
        wait_for_steps(run_dir)
        # Two workers, a data worker of each, and the saver.
        family = psutil.Process(run.process.pid).children(recursive=True)
        assert len(family) >= 5
        run.process.kill()
        try:
            wait_for_end(family)
        finally:
            for process in family:
                kill(process)
    # The store died with the agent, and still the state was saved.
    last_stop(run_dir)


def test_a_stop_is_heard_while_waiting_for_the_others(tmp_path: Path) -> None:
    """One of two nodes has started: its agent's store is there, the other rank is not."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [*RUN, *ARGUMENTS, f"run.dir={tmp_path}/run"]
    with started(command, log=tmp_path / "log.txt", extra_environment=place) as run:
        worker = psutil.Process(run.process.pid)
        wait_until(
            lambda: any(one.raddr and one.raddr.port == port for one in worker.net_connections()),
            what="a connection to the store",
        )
        time.sleep(0.5)
        assert worker.is_running()
        run.process.terminate()
        assert run.wait(SOON_S) == 75, run.output()
    assert "SIGTERM" in run.output()
    assert "Traceback" not in run.output()
    assert store.num_keys() > 0


@pytest.mark.parametrize("more", ["parallel=fsdp", "data.workers=1"])
def test_the_end_is_clean(more: str, tmp_path: Path) -> None:
    """That of a run with neither is seen by tests/process/test_kill.py."""
    mark = uuid.uuid4().hex
    arguments = [*TINY, "train.steps=2", "train.eval_every_steps=0", more, f"run.dir={tmp_path}/run"]
    output = train(arguments, world_size=2, folder=tmp_path, extra_environment={"MARK": mark}, warm=False)
    assert not marked(mark)
    assert not re.search(r"warn|error|abort|terminate|traceback|leaked", output, re.IGNORECASE), output
    (stop,) = events(tmp_path / "run", "stop")
    assert (stop["step"], stop["exit_code"]) == (2, 0)
    assert not events(tmp_path / "run", "failure")
