"""A run under the launcher for `bench_recovery.py`: its processes, its events as they are written, and what it uses."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from recovery_report import Sample

from elastictrain.chaos.processes import StuckError, rank_of, savers, workers_among
from elastictrain.chaos.run_events import RunEvents
from elastictrain.liveness.monitor_client import default_parent
from elastictrain.liveness.progress import STEP_PHASES
from elastictrain.liveness.progress_file import ProgressFileReader

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
STOP_LIMIT_S = 120.0
LOOK_S = 0.02


@dataclass(slots=True)
class Run:
    """A launcher with its workers. All that it started ends with `started`."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    events: RunEvents

    def family(self) -> dict[int, psutil.Process]:
        with suppress(psutil.Error):
            return {one.pid: one for one in psutil.Process(self.process.pid).children(recursive=True)}
        return {}

    def workers(self) -> dict[int, psutil.Process]:
        """Living workers by rank."""
        found = {}
        for one in workers_among(self.family().values(), program="elastictrain.run"):
            with suppress(psutil.Error):
                if (rank := rank_of(one)) is not None:
                    found[rank] = one
        return found

    def wait(self, condition: Callable[[], object], *, what: str, limit_s: float = LIMIT_S, every_s: float = LOOK_S) -> None:
        """Raises: StuckError."""
        until_s = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise StuckError(f"the launcher ended with exit code {self.process.returncode} while waiting for {what}")
            if time.monotonic() > until_s:
                raise StuckError(f"waited {limit_s:.0f} s for {what}")
            time.sleep(every_s)

    def stop(self) -> int:
        """Exit code of the launcher, which was asked to stop unless it had ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S)


@contextmanager
def started(overrides: Mapping[str, str], folder: Path, memory: Path) -> Iterator[Run]:
    """A run in `folder`, with a host memory of its own in `memory`; both are made."""
    folder.mkdir()
    memory.mkdir()
    options = {"checkpoint.memory_dir": str(memory), "run.dir": str(folder / "run"), **overrides}
    command = [sys.executable, "-m", "elastictrain.launch", *(f"{name}={value}" for name, value in options.items())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    run = Run(process, folder, RunEvents(folder / "run"))
    try:
        yield run
    finally:
        family = [*run.family().values(), psutil.Process(process.pid)] if process.poll() is None else []
        for one in [*family, *savers(memory)]:
            with suppress(psutil.Error):
                one.kill()
        process.wait()
        # It may be much, and the next run needs it.
        shutil.rmtree(memory, ignore_errors=True)


def sample(run: Run, memory: Path) -> list[Sample]:
    """Resources of launcher, fork server, each worker and the saver; of the memory that files use, and of GPUs."""
    processes = {"launcher": psutil.Process(run.process.pid)}
    for one in run.family().values():
        with suppress(psutil.Error):
            if "elastictrain.launch.fork_server" in one.cmdline() and one.ppid() == run.process.pid:
                processes["fork server"] = one
    processes |= {f"rank {rank}": one for rank, one in run.workers().items()}
    processes |= {f"saver {number}": one for number, one in enumerate(savers(memory), 1)}
    found = []
    for label, process in processes.items():
        with suppress(psutil.Error):
            size = process.memory_info().rss
            found.append(Sample(label, {"descriptors": process.num_fds(), "threads": process.num_threads(), "bytes": size}))
    for label, folder in (("host memory", memory), ("marks", Path(default_parent()))):
        blocks = 0
        for path in folder.rglob("*"):
            with suppress(OSError):
                blocks += path.stat().st_blocks
        found.append(Sample(label, {"bytes": 512.0 * blocks}))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        found += [Sample(f"GPU {index}", {"bytes": float(one) * 2**20}) for index, one in enumerate(said.split())]
    return found


def reached(run: Run, moment: str, since: float, since_s: float) -> bool:
    """Whether a recovery that began at `since` (Unix) or `since_s` (monotonic) has come to a moment.

    That is an event of rank 0 or of the launcher, by name, or a phase (`elastictrain.liveness.progress.Phase`) of a worker; the
    phases of a step only before the first one is done, because survivors may enter them before they notice.
    """
    run.events.update()
    if any(row["event"] == moment and row["time"] > since for row in (*run.events.rows, *run.events.launcher)):
        return True
    for path in Path(default_parent()).glob("*/r*.marks"):
        with suppress(OSError, ValueError), closing(ProgressFileReader(str(path.parent), int(path.stem[1:]))) as reader:
            progress = reader.read()
            if progress is None or progress.mark.phase != moment or progress.mark.since_s <= since_s:
                continue
            late = progress.mark.first_step_done and progress.mark.phase in STEP_PHASES
            # Last, because it looks at all processes: a phase may last milliseconds.
            if not late and reader.pid in run.family():
                return True
    return False
