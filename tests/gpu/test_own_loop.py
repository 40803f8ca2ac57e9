"""A loop that its user has written, on GPUs, under torchrun and under the launcher: killed, and the same run bit for bit."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torchruns import Run, events, kill, last_step, losses, savers, started, torchrun, wait_until

import elastictrain

HERE = Path(__file__).parent
STEPS = 200


def shared_device() -> dict[str, str]:
    """Variables for ranks that share a device, and communicate over sockets."""
    if torch.cuda.device_count() >= 2:
        return {}
    paths = [str(HERE / "shared_device"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {"RANKS_PER_DEVICE": "2", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "PYTHONPATH": path}


@contextmanager
def run_of(folder: Path, *, max_restarts: int = 0) -> Iterator[Run]:
    memory = folder.with_name("memory")
    memory.mkdir(exist_ok=True)
    with torchrun(
        [str(folder), str(STEPS), str(memory)],
        world_size=2,
        folder=folder.with_name(f"{folder.name}-log"),
        max_restarts=max_restarts,
        module=[str(HERE / "own_loop_fsdp.py")],
        extra_environment=shared_device(),
        warm=False,
    ) as run:
        yield run
    for saver in savers(folder.parent):
        saver.kill()


def ranks(run: Run) -> list[psutil.Process]:
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "own_loop_fsdp.py" in " ".join(child.cmdline())]


@pytest.mark.one_device
def test_killed_it_is_the_same_run(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with run_of(whole) as run:
        assert run.wait(200) == 0, run.output()[-4000:]
    with run_of(killed, max_restarts=3) as run:
        for number, step in enumerate((20, 100)):
            wait_until(lambda least=step: last_step(killed) >= least, timeout_s=120, what=f"step {step}")  # type: ignore[misc]
            kill(ranks(run)[number])
        assert run.wait(200) == 0, run.output()[-4000:]
    assert [row["tier"] for row in events(killed, "resume")] == ["none", "memory", "memory"]
    assert losses(killed) == losses(whole)
    ours, theirs = elastictrain.load(str(killed)), elastictrain.load(str(whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.one_device
def test_a_recoverable_function_goes_on_in_place(tmp_path: Path) -> None:
    whole, killed, memory = tmp_path / "whole", tmp_path / "killed", tmp_path / "memory"
    with run_of(whole) as run:
        assert run.wait(200) == 0, run.output()[-4000:]
    options = ["preflight=off", "launch.notices=false", "launch.processes=2", f"checkpoint.memory_dir={memory}"]
    program = [str(HERE / "own_loop_fsdp.py"), str(killed), str(STEPS), str(memory), "recoverable"]
    command = [sys.executable, "-m", "elastictrain.launch", *options, f"run.dir={killed}", "--", *program]
    with started(command, log=tmp_path / "log.txt", cwd=tmp_path, extra_environment=shared_device(), warm=False) as run:
        for number, step in enumerate((40, 100), start=1):
            wait_until(lambda least=step: last_step(killed) >= least, timeout_s=120, what=f"step {step}")  # type: ignore[misc]
            kill(run.workers()[number % 2])
            wait_until(lambda least=number: len(events(killed, "recovery")) >= least, timeout_s=60, what="recovery")  # type: ignore[misc]
        assert run.wait(200) == 0, run.output()[-4000:]
    for saver in savers(tmp_path):
        saver.kill()
    # Over sockets a survivor may take longer to leave its groups than it is given; then it is replaced, too.
    assert "in_place" in [row["rung"] for row in events(killed, "recovery")]
    assert losses(killed) == losses(whole)
    ours, theirs = elastictrain.load(str(killed)), elastictrain.load(str(whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
