"""Runs with faults at chosen places, and what must be true after every run."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from torchruns import REPOSITORY, TINY, Run, events, kill, memory_arguments, savers, started, torchrun, wait_until

HOOKS = Path(__file__).parent / "hooks"
STEPS = 40
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    "task.pause_s=0.005",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=6",
    "checkpoint.snapshot_every_steps=2",
    "checkpoint.manifest_mb=0",
    "fault.heartbeat_s=0.2",
)

_CHECKPOINT = "elastictrain.checkpoint"
BEGIN = f"{_CHECKPOINT}.memory.slot:Slot.begin"
COPY = f"{_CHECKPOINT}.copier:copy_on_host"
BODY = f"{_CHECKPOINT}.memory.slot:write_body"
COMPLETE = f"{_CHECKPOINT}.memory.slot:Slot.complete"
NOTE_DIGESTS = f"{_CHECKPOINT}.memory.records:store_digests"
WRITE = "elastictrain.storage.posix:UnfinishedFile.write"
CREATE = f"{_CHECKPOINT}.writer:create_exactly"  # first of a part of the manifest
COMMIT = f"{_CHECKPOINT}.writer:commit"
PRUNE = f"{_CHECKPOINT}.retention:delete_folder"
FACTS = f"{_CHECKPOINT}.saver.process:load_config"
LOAD = f"{_CHECKPOINT}.reader:load"


@dataclass(frozen=True, slots=True)
class Fault:
    """See hooks/sitecustomize.py."""

    at: str
    what: str
    when: str = "before"
    nth: int = 1
    always: bool = False


def with_faults(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """The environment in which these faults happen, one after another; marks of them appear in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "FAULTS": json.dumps([asdict(fault) for fault in faults]),
        "FAULTS_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HOOKS), str(REPOSITORY)]),
    }


def fired(folder: Path) -> int:
    """How many faults have happened."""
    return len(list(folder.glob("fired-*")))


def found_at_start(folder: Path) -> dict[str, dict[str, int]]:
    """By incarnation: the newest whole step in memory and in storage, before anything was restored."""
    return {path.stem.removeprefix("found-"): json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))}


def check_resumed_from_newest(run_dir: Path, folder: Path) -> list[dict[str, Any]]:
    """Each start took the newest step that was whole anywhere; returns the `resume` events."""
    resumed = events(run_dir, "resume")
    found = found_at_start(folder)
    for row in resumed:
        there = found[row["incarnation"]]
        assert row["step"] == max(there.values()), (row, there)
        assert row["tier"] == ("none" if not row["step"] else "memory" if there["memory"] == row["step"] else "storage"), (
            row,
            there,
        )
    return resumed


@contextmanager
def launched(arguments: Sequence[str], *, world_size: int, folder: Path, **options: Any) -> Iterator[Run]:
    """A run of one rank without torchrun, or of several ranks with torchrun."""
    if world_size > 1:
        with torchrun(arguments, world_size=world_size, folder=folder, **options) as run:
            yield run
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "elastictrain.run", *arguments, *memory_arguments(arguments, folder)]
    with started(command, log=folder / "log.txt", **options) as run:
        yield run


def kill_everything(run: Run, *others: psutil.Process) -> None:
    """At once, so that nobody has time to say anything; of savers only those that are named."""
    family = [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]
    victims = [one for one in family if "elastictrain.checkpoint.saver" not in one.cmdline()] + list(others)
    for victim in victims:
        victim.suspend()
    for victim in victims:
        kill(victim)
    run.process.wait(60)


def processes_below(folder: Path) -> list[psutil.Process]:
    """Everything that was started with a path below a folder, or in one."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in (*process.cmdline(), process.cwd())):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def check_nothing_left(tmp_path: Path, *, timeout_s: float = 60) -> None:
    """No process of the run lives, and host memory is empty."""
    wait_until(lambda: not savers(tmp_path), timeout_s=timeout_s, what="the end of the saver")
    # The monitor ends when it finds no rank.
    wait_until(lambda: not processes_below(tmp_path), timeout_s=10, what="the end of all processes")
    memory = tmp_path / "host-memory"
    left = sorted(str(path.relative_to(memory)) for path in memory.rglob("*"))
    assert not left, left
