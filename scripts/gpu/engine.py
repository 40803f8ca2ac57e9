"""The checkpoint engine on GPUs of one host, under real training: what snapshots cost, persisting and restoring against raw
file access, and the time from SIGKILL of a worker to the next new step, under torchrun and under our launcher in turns.

    python scripts/gpu/engine.py [snapshots] [safety] [persist] [kill]     (all by default; Llama 1b, FSDP, on every GPU)

TURNS is how often runs with and without something take their turns, WORLD the number of GPUs, DISK the folder for checkpoints,
SAVES how many of them are timed, HOW what restarts the killed workers: `launch`, `torchrun`, or both by default; KILLS how many
are killed in each run, AFTER how many steps after a snapshot.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "process"))

from torchruns import Run, events, kill, last_step, started, torchrun, wait_until  # noqa: E402

WORLD = int(os.environ.get("WORLD", "2"))
BASE = (
    "recipe=llama_fsdp",
    "data=stdlib",
    "data.holdout_samples=0",
    f"train.global_batch={4 * WORLD}",
    "train.micro_batch=4",
    "optim.schedule=constant",
    "train.eval_every_steps=0",
    "telemetry.loggers=[]",
    "checkpoint.every_steps=0",
    "checkpoint.memory_dir=/dev/shm",
    *os.environ.get("EXTRA", "").split(),
)
STREAMS = 3
FIRST_STEP, LAST_STEP = 61, 110
SAFE = (
    "checkpoint.snapshot_every_steps=1",
    "checkpoint.every_steps=25",
    "fault.compare_every_steps=10",
    "telemetry.loggers=[tensorboard]",
)
BARE = ("checkpoint.buffers=0", "fault.compare_every_steps=0")
SAVES, SAVE_EVERY = int(os.environ.get("SAVES", "3")), 100
AFTER = int(os.environ.get("AFTER", "5"))
KILLS = int(os.environ.get("KILLS", "3"))


def print_line(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def train(run_dir: Path, *arguments: str, steps: int) -> None:
    """Run to step `steps`, and end without the checkpoint at the end: the process tree is killed."""
    with torchrun(
        [*BASE, f"train.steps={10 * steps}", f"run.dir={run_dir}", *arguments],
        world_size=WORLD,
        folder=run_dir.parent / f"{run_dir.name}-log",
    ) as run:
        wait_until(lambda: last_step(run_dir) >= steps or run.process.poll() is not None, timeout_s=240, what=f"step {steps}")
        if run.process.poll() is not None:
            print(run.output()[-4000:], flush=True)


def durations(run_dir: Path) -> dict[int, float]:
    """Seconds of each step but the first 15, by its number."""
    rows = list(events(run_dir, "step"))
    return {b["step"]: b["time"] - a["time"] for a, b in itertools.pairwise(rows) if b["step"] > 15}


def snapshots(folder: Path) -> None:
    """Runs with and without snapshots every 10 steps, in turns."""
    take_turns(folder, "throughput", {"with": ("checkpoint.snapshot_every_steps=10",), "without": ("checkpoint.buffers=0",)})


def safety(folder: Path) -> None:
    """Runs with a snapshot each step, a saver that writes to disk again and again, comparisons of replicas and TensorBoard,
    and runs with nothing of it, in turns."""
    take_turns(folder, "safety", {"with": SAFE, "without": BARE})


def take_turns(folder: Path, what: str, kinds: dict[str, tuple[str, ...]]) -> None:
    """The steps after slots were made, of runs `with` and `without`."""
    means: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(int(os.environ.get("TURNS", "2"))):
        for kind, arguments in kinds.items():
            run_dir = folder / f"{what}-{kind}-{turn}"
            train(run_dir, *arguments, steps=LAST_STEP)
            took = {step: seconds for step, seconds in durations(run_dir).items() if FIRST_STEP <= step <= LAST_STEP}
            means[kind].append(statistics.fmean(took.values()))
            if kind == "with":
                report_snapshots(run_dir, took)
    print_line(
        what=what,
        step_with_s=means["with"],
        step_without_s=means["without"],
        cost=statistics.fmean(means["with"]) / statistics.fmean(means["without"]) - 1,
    )


def report_snapshots(run_dir: Path, took: dict[int, float]) -> None:
    taken = {row["step"]: row for row in events(run_dir, "snapshot")}
    steps = [step for step in taken if step in took and step + 2 in took]
    beside = {step + offset for step in steps for offset in (0, 1, 2)}
    # With a snapshot in each step there is no step without one to compare with.
    quiet = statistics.median([seconds for step, seconds in took.items() if step not in beside] or took.values())
    # A step is settled one step late, so what a snapshot costs may show in any of the three.
    extra = [sum(took[step + offset] - quiet for offset in (0, 1, 2)) for step in steps]
    during = statistics.median(took[step + 1] for step in steps)
    rates = [row["bytes"] / row["copy_s"] / 1e9 for step, row in taken.items() if step in steps]
    print_line(
        what="snapshots",
        taken=sorted(taken),
        gb=next(iter(taken.values()))["bytes"] / 1e9 if taken else 0,
        stall_loop_ms=[round(1e3 * row["stall_s"], 1) for row in taken.values()],
        visible_ms=[round(1e3 * value, 1) for value in extra],
        visible_median_ms=1e3 * statistics.median(extra),
        quiet_step_s=quiet,
        step_during_s=during,
        slower=during / quiet - 1,
        copy_gb_per_s=[round(rate, 1) for rate in rates],
    )


def persist(folder: Path) -> None:
    """Checkpoints to disk while training, and raw writes in turns with them; then a start from one, against raw reads."""
    run_dir = folder / "persist"
    raw: list[float] = []
    with torchrun(
        [*BASE, "train.steps=100000", "train.compile=false", f"checkpoint.every_steps={SAVE_EVERY}", f"run.dir={run_dir}"],
        world_size=WORLD,
        folder=folder / "persist-log",
    ) as run:
        for number in range(SAVES):
            wait_until(
                lambda number=number: len(events(run_dir, "checkpoint_saved")) > number, timeout_s=150, what="a checkpoint"
            )
            raw.append(raw_write(folder, events(run_dir, "checkpoint_saved")[number]["bytes"]))
        run.kill_tree()
    saved = events(run_dir, "checkpoint_saved")[:SAVES]
    ours = [row["seconds"]["write"] for row in saved]
    print_line(
        what="persist",
        gb=saved[0]["bytes"] / 1e9,
        seconds=[row["seconds"] for row in saved],
        gb_per_s=[row["bytes"] / seconds / 1e9 for row, seconds in zip(saved, ours, strict=True)],
        raw_gb_per_s=[row["bytes"] / seconds / 1e9 for row, seconds in zip(saved, raw, strict=True)],
        ratio=statistics.median(raw) / statistics.median(ours),
    )
    restore(folder, run_dir)


def restore(folder: Path, run_dir: Path) -> None:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    for cold in (True, False):
        raw_s = raw_read(newest, cold=cold)
        if cold:
            drop_cache(newest)
        target = folder / f"restore-{cold}"
        subprocess.run(["cp", "-al", str(run_dir), str(target)], check=True)
        with torchrun(
            [*BASE, "train.steps=1000", "checkpoint.buffers=0", f"run.dir={target}"],
            world_size=WORLD,
            folder=folder / f"restore-log-{cold}",
        ) as run:
            before = len(events(target, "resume"))
            wait_until(
                lambda target=target, before=before: len(events(target, "resume")) > before, timeout_s=120, what="resume"
            )
            run.kill_tree()
        resume = events(target, "resume")[-1]
        print_line(
            what="restore from disk",
            cold=cold,
            resume={name: resume[name] for name in ("step", "tier", "bytes", "seconds")},
            gb_per_s=resume["bytes"] / resume["seconds"]["read"] / 1e9,
            raw_gb_per_s=resume["bytes"] / raw_s / 1e9,
            ratio=raw_s / resume["seconds"]["read"],
        )


def raw_write(folder: Path, size_bytes: int) -> float:
    """Seconds to write and sync that many bytes, in as many streams as the saver uses."""
    streams = STREAMS * WORLD
    block = os.urandom(1 << 20) * 8

    def write(index: int) -> None:
        path = folder / f"raw-{index}"
        with path.open("wb", buffering=0) as file:
            for _ in range(size_bytes // streams // len(block)):
                file.write(block)
            os.fsync(file.fileno())

    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(write, range(streams)))
    seconds = time.monotonic() - began
    for index in range(streams):
        (folder / f"raw-{index}").unlink()
    return seconds


def drop_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_read(folder: Path, *, cold: bool) -> float:
    """Seconds to read all shard files once, four threads per rank as a restore has."""
    if cold:
        drop_cache(folder)
    pieces = [
        (path, start) for path in sorted(folder.glob("*.safetensors")) for start in range(0, path.stat().st_size, 32 << 20)
    ]

    def read(piece: tuple[Path, int]) -> None:
        descriptor = os.open(piece[0], os.O_RDONLY)
        buffer = bytearray(32 << 20)
        os.preadv(descriptor, [buffer], piece[1])
        os.close(descriptor)

    began = time.monotonic()
    with ThreadPoolExecutor(4 * WORLD) as pool:
        list(pool.map(read, pieces))
    return time.monotonic() - began


def launched(arguments: list[str], folder: Path) -> AbstractContextManager[Run]:
    """The same run under our launcher."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "elastictrain.launch", *arguments, f"launch.processes={WORLD}", "launch.notices=false"]
    return started(command, log=folder / "log.txt")


def kills(folder: Path) -> None:
    """SIGKILL of the last rank, `AFTER` steps after a snapshot: the state is in host memory, an older one on disk."""
    for turn in range(int(os.environ.get("TURNS", "1"))):
        for how in os.environ.get("HOW", "launch torchrun").split():
            run_dir = folder / f"killed-{how}-{turn}"
            arguments = [*BASE, "train.steps=1000", "train.compile=false", f"checkpoint.every_steps={SAVE_EVERY}"]
            arguments.append(f"run.dir={run_dir}")
            log = folder / f"kill-log-{how}-{turn}"
            manager = (
                launched(arguments, log)
                if how == "launch"
                else torchrun(arguments, world_size=WORLD, folder=log, max_restarts=KILLS)
            )
            with manager as run:
                try:
                    for _ in range(KILLS):
                        kill_one(run, run_dir, how=how)
                finally:
                    print(run.output()[-30000:], flush=True)


def may_kill(run_dir: Path) -> bool:
    """Whether all slots of this life have been made, and a snapshot is `AFTER` steps old."""
    taken = events(run_dir, "snapshot")
    mine = [row for row in taken if row["incarnation"] == taken[-1]["incarnation"]] if taken else []
    return len({row["slot"] for row in mine}) > 1 and 0 <= last_step(run_dir) - mine[-1]["step"] - AFTER <= 1


def new_steps(run_dir: Path, before: str) -> list[dict[str, Any]]:
    """The steps of the newest life that the one before had not done."""
    rows = events(run_dir, "step")
    newest = events(run_dir, "start")[-1]["incarnation"]
    highest = max(row["step"] for row in rows if row["incarnation"] == before)
    return [row for row in rows if newest != before and row["incarnation"] == newest and row["step"] > highest]


def kill_one(run: Run, run_dir: Path, *, how: str) -> None:
    """Kill, and what became of it."""
    wait_until(lambda: may_kill(run_dir), timeout_s=150, what="a snapshot in each slot")
    before = events(run_dir, "start")[-1]["incarnation"]
    killed = time.time()
    kill(run.workers()[-1])
    wait_until(lambda: len(new_steps(run_dir, before)) > 1, timeout_s=120, what="new steps")
    # The last steps before the kill may have come to the log after it.
    highest = max(row["step"] for row in events(run_dir, "step") if row["incarnation"] == before)
    after = [row for row in events(run_dir) if row["time"] > killed]
    resume = next(row for row in after if row["event"] == "resume")
    start = next(row for row in after if row["event"] == "start")
    steps = [row for row in after if row["event"] == "step" and row["incarnation"] == start["incarnation"]]
    new = new_steps(run_dir, before)[0]
    print_line(
        what="kill",
        how=how,
        step_at_kill=highest,
        killed_at=killed,
        failure_s=[round(row["time"] - killed, 2) for row in after if row["event"] == "failure"][:1],
        start_s=start["time"] - killed,
        phases=start["seconds"],
        resume={name: resume[name] for name in ("step", "tier", "bytes", "seconds")},
        resumed_s=resume["time"] - killed,
        first_step=steps[0]["step"],
        first_step_s=steps[0]["time"] - killed,
        new_step_s=new["time"] - killed,
    )
    losses: dict[int, set[float]] = {}
    for row in events(run_dir, "step"):
        losses.setdefault(row["step"], set()).add(row["loss"])
    print_line(
        what="losses of repeated steps", differing={step: sorted(found) for step, found in losses.items() if len(found) > 1}
    )


def main() -> None:
    wanted = sys.argv[1:] or ["snapshots", "safety", "persist", "kill"]
    with tempfile.TemporaryDirectory(dir=os.environ.get("DISK", "/tmp"), ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for section, run in (("kill", kills), ("snapshots", snapshots), ("safety", safety), ("persist", persist)):
            if section in wanted:
                try:
                    run(folder)
                except AssertionError as error:
                    print_line(what=section, error=str(error)[:2000])
    subprocess.run(
        "ls -la /dev/shm/elastictrain-*/* 2>/dev/null | head; ps aux | grep -c checkpoint.saver", shell=True, check=False
    )


if __name__ == "__main__":
    main()
