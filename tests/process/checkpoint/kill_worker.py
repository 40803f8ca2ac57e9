"""Forks a child per operation of a save; each is killed (SIGKILL) just before its operation. Then restores in the parent.

Usage: kill_worker.py FOLDER. Operations are the system calls by which the local store changes the disk, so that deaths
between a temporary file and its rename, and between deletions, are among them. Prints how many there were.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.config.composed import CheckpointGroup
from elastictrain.storage.opening import open_store

CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "rmdir", "mkdir")


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.full((80, 16), float(step)),
        "optim.m": torch.full((80, 16), -float(step)),
        "optim.step": torch.tensor(step),
    }


def checkpointer(run_dir: Path, incarnation: str, *, keep_last: int = 2) -> Checkpointer:
    return Checkpointer(
        open_store(str(run_dir)),
        options=CheckpointGroup(keep_last=keep_last, shard_mb=0.006, manifest_mb=0),
        group=None,
        rank=0,
        world_size=1,
        incarnation=incarnation,
        config_digest="c",
        record=lambda event: None,
    )


def save(run_dir: Path, incarnation: str, step: int, *, keep_last: int = 2) -> None:
    checkpointer(run_dir, incarnation, keep_last=keep_last).save(
        step, tensors=tensors_of(step), state={"step": step}, reason="step"
    )


def restored_step(run_dir: Path) -> int:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
    result = checkpointer(run_dir, "later").restore(tensors=loaded, reset=lambda: None)
    assert result is not None
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors_of(result.step).items())
    return result.step


def die_before(nth: int) -> None:
    """Counts the calls that may change the disk, of all threads, and ends the process at one of them."""
    numbers = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def killed_save(run_dir: Path, nth: int) -> bool:
    """Whether the child was killed, rather than finished first."""
    child = os.fork()
    if child == 0:
        die_before(nth)
        save(run_dir, "victim", 3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def main(folder: Path) -> None:
    template = folder / "template"
    save(template, "first", 1)
    save(template, "second", 2)
    steps = []
    killed = True
    while killed:
        run_dir = folder / f"run{len(steps)}"
        shutil.copytree(template, run_dir)
        killed = killed_save(run_dir, len(steps))
        committed = (run_dir / "checkpoints/step-000000003/manifest.json").exists()
        steps.append(restored_step(run_dir))
        assert steps[-1] == (3 if committed else 2), (steps, committed)
        save(run_dir, "next", 4, keep_last=1)
        left = [path for path in run_dir.rglob("*") if path.is_file() and not path.name.startswith(".")]
        assert {path.parent.name for path in left if path.name != "committed.json"} == {"step-000000004"}, left
        assert run_dir / "checkpoints/committed.json" in left
        shutil.rmtree(run_dir)
    # Threads may share the calls that make a folder: the number at which a save commits varies.
    assert (steps[0], steps[-1]) == (2, 3), steps
    sys.stdout.write(json.dumps({"before": steps.count(2), "after": steps.count(3)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
