"""What it costs when workers of a run die: kills them by a plan from a seed, and compares the run with an undisturbed one.

    python scripts/bench_recovery.py --workers 2 --kills 20 [-- data=stdlib train.compile=false ...]
    python scripts/bench_recovery.py --recipe llama_fsdp --workers 4 --kills 5 --every 60 -- data=stdlib

Starts `python -m elastictrain.launch recipe=...` on this machine. After each kill it prints the time until the next step that
no process had done before, how many steps were repeated, and how many survivors kept their process; at the end the same by kind
of recovery, the goodput, what grew, and whether losses and ledger (`-- data.ledger=true`) are those of a run that nothing
happened to. Exit code 1 if they are not. The goodput is the time that the undisturbed run took for the same steps as a share of
the time that this one took.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from recovery_report import (  # noqa: E402
    Outcome,
    Row,
    Sample,
    Strike,
    differences,
    elapsed_s,
    goodput,
    growth,
    growth_table,
    judge,
    last_step,
    ledger_differences,
    new_step,
    steps_of,
    table,
    usual_step_s,
)

from elastictrain.data.ledger import fold, read_ledger  # noqa: E402
from elastictrain.liveness.monitor_client import default_parent  # noqa: E402
from elastictrain.liveness.progress import STEP_PHASES  # noqa: E402
from elastictrain.liveness.progress_file import ProgressFileReader  # noqa: E402
from elastictrain.storage.opening import open_store  # noqa: E402

LIMIT_S = 300.0
STOP_LIMIT_S = 120.0
LOOK_S = 0.02
MOMENT_LOOK_S = 0.005
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class StuckError(Exception):
    """The run ended, or made no new step in time."""


@dataclass(slots=True)
class Events:
    """Rows of rank 0 and of the launcher, read as they are written."""

    run_dir: Path
    rows: list[Row] = field(default_factory=list)  # of rank 0, by time
    launcher: list[Row] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)

    def look(self) -> list[Row]:
        """Reads what is new; returns the rows of rank 0."""
        for kind, pattern in ((self.rows, "*-r00000*.jsonl"), (self.launcher, "launcher-*.jsonl")):
            for path in sorted((self.run_dir / "events").glob(pattern)):
                before = self._read.get(path.name, 0)
                if path.stat().st_size > before:
                    with path.open("rb") as file:
                        file.seek(before)
                        # The line that is being written is read when it is whole.
                        data = file.read().rpartition(b"\n")[0]
                    self._read[path.name] = before + len(data) + bool(data)
                    kind += [json.loads(line) for line in data.splitlines()]
            kind.sort(key=lambda row: float(row["time"]))
        return self.rows


@dataclass(slots=True)
class Run:
    """A launcher with its workers. All that it started ends with `started`."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    events: Events

    def family(self) -> dict[int, psutil.Process]:
        with suppress(psutil.Error):
            return {one.pid: one for one in psutil.Process(self.process.pid).children(recursive=True)}
        return {}

    def workers(self) -> dict[int, psutil.Process]:
        """Living workers by rank."""
        found: dict[int, psutil.Process] = {}
        for one in self.family().values():
            with suppress(psutil.Error):
                rank = rank_of(one)
                if rank is not None and one.status() not in GONE:
                    found[rank] = max(found.get(rank, one), one, key=lambda process: process.create_time())
        return dict(sorted(found.items()))

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


def rank_of(process: psutil.Process) -> int | None:
    """Forked workers are named after their rank; others have it in their environment."""
    name = process.name()
    if name.startswith("rank ") and name[5:].isdigit():
        return int(name[5:])
    if "elastictrain.run" in process.cmdline():
        return int(process.environ().get("RANK", "-1"))
    return None


@contextmanager
def started(parsed: argparse.Namespace, folder: Path, memory: Path) -> Iterator[Run]:
    """The run of these arguments in `folder`, with a host memory of its own."""
    folder.mkdir()
    memory.mkdir()
    options = {
        "recipe": parsed.recipe,
        "launch.processes": str(parsed.workers),
        "launch.notices": "false",
        "train.steps": "100000",
        "checkpoint.memory_dir": str(memory),
        "run.dir": str(folder / "run"),
    } | dict(one.partition("=")[::2] for one in parsed.overrides)
    command = [sys.executable, "-m", "elastictrain.launch", *(f"{name}={value}" for name, value in options.items())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    run = Run(process, folder, Events(folder / "run"))
    try:
        yield run
    finally:
        family = [*run.family().values(), psutil.Process(process.pid)] if process.poll() is None else []
        for one in [*family, *savers(memory)]:
            with suppress(psutil.Error):
                one.kill()
        process.wait()


def savers(memory: Path) -> list[psutil.Process]:
    """Savers whose host memory lies below a folder; they outlive their launcher."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "elastictrain.checkpoint.saver" in line and line[-1].startswith(str(memory)):
                found.append(process)
    return found


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
    run.events.look()
    if any(row["event"] == moment and row["time"] > since for row in (*run.events.rows, *run.events.launcher)):
        return True
    workers = {one.pid for one in run.workers().values()}
    for path in Path(default_parent()).glob("*/r*.marks"):
        with suppress(OSError, ValueError), closing(ProgressFileReader(str(path.parent), int(path.stem[1:]))) as reader:
            if reader.pid in workers and (progress := reader.read()) is not None:
                mark = progress.mark
                late = mark.first_step_done and mark.phase in STEP_PHASES
                if mark.phase == moment and mark.since_s > since_s and not late:
                    return True
    return False


@dataclass(slots=True)
class Bench:
    """The plan, and what was done to one run."""

    run: Run
    parsed: argparse.Namespace
    memory: Path
    chance: random.Random
    strikes: list[Strike] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[list[Sample]] = field(default_factory=list)

    def strike(self, during: str = "") -> None:
        """One signal, to one worker or two."""
        workers = self.run.workers()
        ranks = tuple(sorted(self.chance.sample([*workers], min(len(workers), 1 + (self.parsed.victims == "two")))))
        now = time.time()
        for rank in ranks:
            with suppress(psutil.Error):
                workers[rank].send_signal(signal.Signals[f"SIG{self.parsed.signal}"])
        if ranks:
            self.strikes.append(Strike(time=now, ranks=ranks, pids={k: one.pid for k, one in workers.items()}, during=during))

    def strike_again(self) -> None:
        """The second strike of a turn, if the plan has one."""
        first, parsed, began_s = self.strikes[-1], self.parsed, time.monotonic()
        if parsed.again is not None:
            time.sleep(max(0.0, first.time + parsed.again - time.time()))
            # A recovery by new processes has none for a moment.
            self.run.wait(self.run.workers, what="a worker", every_s=MOMENT_LOOK_S)
            self.strike(f"{parsed.again:g} s")
        elif parsed.during:
            over = lambda: new_step(self.run.events.look(), first.time) is not None  # noqa: E731
            there = lambda: reached(self.run, parsed.during, first.time, began_s)  # noqa: E731
            self.run.wait(lambda: there() or over(), what=parsed.during, every_s=MOMENT_LOOK_S)
            if over():
                print(f"         {parsed.during} was not seen in this recovery")
            else:
                self.strike(parsed.during)

    def turn(self) -> None:
        """Strike, and wait until the run makes new steps."""
        before = len(self.strikes)
        self.strike()
        self.strike_again()
        mine = self.strikes[before:]
        self.run.wait(lambda: new_step(self.run.events.look(), mine[-1].time), what="a new step")
        pids = {rank: one.pid for rank, one in self.run.workers().items()}
        self.samples.append(sample(self.run, self.memory))
        for one in mine:
            others = {rank for other in mine if other is not one for rank in other.ranks}
            outcome = judge(one, self.run.events.look(), pids=pids, struck_too=others)
            self.outcomes.append(outcome)
            who = "rank " + " and ".join(map(str, one.ranks)) + (f" in {one.during}" if one.during else "")
            print(
                f"kill {len(self.outcomes):3d}: {who} at step {outcome.last_step}: {outcome.rung}, new step after "
                f"{outcome.new_step_s:.2f} s, {outcome.steps_repeated} repeated, "
                f"{outcome.survivors_kept}/{outcome.survivors} survivors",
                flush=True,
            )

    def pause(self, due_s: float) -> float:
        """Wait for the next turn, which is due at `due_s` (monotonic) with --every; returns when the one after it is."""
        parsed, after = self.parsed, last_step(self.run.events.look())
        if parsed.every is not None:
            self.run.wait(lambda: time.monotonic() >= due_s, what="the next turn", limit_s=float("inf"))
            return due_s + float(parsed.every)
        wanted = after + parsed.steps + self.chance.randrange(parsed.steps) - 1
        self.run.wait(lambda: last_step(self.run.events.look()) >= wanted, what="new steps")
        # Steps are seen as they end, and deaths come at any point of a step.
        earlier, later = steps_of(self.run.events.rows)[-2:]
        time.sleep(parsed.gap + self.chance.uniform(0, later["time"] - earlier["time"]))
        return due_s


def disturb(parsed: argparse.Namespace, run: Run, memory: Path) -> Bench:
    """Train, strike by the plan, and stop."""
    bench = Bench(run, parsed, memory, random.Random(parsed.seed))
    run.wait(lambda: last_step(run.events.look()) >= parsed.steps, what="the first steps")
    due_s = time.monotonic() + (parsed.every or 0) / 2
    for _ in range(parsed.kills):
        due_s = bench.pause(due_s)
        bench.turn()
    after = last_step(run.events.look())
    run.wait(lambda: last_step(run.events.look()) >= after + parsed.steps, what="the last steps")
    if (code := run.stop()) not in (0, 75):
        raise StuckError(f"the launcher was asked to stop, and ended with exit code {code}")
    run.events.look()
    return bench


def compare(parsed: argparse.Namespace, run: Run, right: Run) -> list[str]:
    """What differs between a run and an undisturbed one, which this trains to the same step."""
    last = last_step(run.events.rows)
    right.wait(lambda: last_step(right.events.look()) >= last or right.process.poll() == 0, what=f"step {last}", limit_s=36000)
    right.stop()
    problems = differences(run.events.rows, right.events.look())
    if (run.folder / "run" / "ledger").is_dir():
        ledgers = [fold(list(read_ledger(open_store(str(one.folder / "run"))))) for one in (run, right)]
        first, end = steps_of(right.events.rows)[0]["positions"]
        problems += ledger_differences(ledgers[0], ledgers[1], steps=last, batch=end - first)
    return problems


def report(parsed: argparse.Namespace, bench: Bench, *, undisturbed: Sequence[Row], problems: Sequence[str]) -> None:
    """The tables, and all figures as JSON."""
    rows, found = bench.run.events.rows, growth(bench.samples)
    start = next(row for row in rows if row["event"] == "start")
    quiet = [row for row in rows if row["time"] < bench.strikes[0].time]
    usual_s = usual_step_s(undisturbed or quiet)
    last = last_step(rows)
    ideal_s = elapsed_s(undisturbed, last=last) if undisturbed else (last - 1) * usual_s
    share = goodput(rows, undisturbed_s=ideal_s)
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    print(f"\n{start['world_size']} workers, {start['device']}, {os.cpu_count()} CPU cores, {versions}\n")
    print("\n".join([*table(bench.outcomes), "", *growth_table(found), ""]))
    print(f"{last} steps, usually {usual_s:.3f} s each: goodput {share:.1%}")
    if undisturbed:
        print("\n".join(problems[:5]) or "losses, positions and ledger are those of the undisturbed run")
    if parsed.json:
        figures: dict[str, Any] = {"arguments": vars(parsed), "start": start, "steps": last, "usual_step_s": usual_s}
        figures |= {"goodput": share, "problems": list(problems), "growth": found}
        figures |= {"kills": [asdict(one) for one in bench.outcomes]}
        Path(parsed.json).write_text(json.dumps(figures, indent=1, default=str) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama_tiny")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20, help="turns of the plan")
    parser.add_argument("--every", type=float, metavar="S", help="a turn every S seconds, instead of --steps and --gap")
    parser.add_argument(
        "--steps", type=int, default=10, help="the next turn comes after so many new steps, or up to twice as many"
    )
    parser.add_argument("--gap", type=float, default=0.0, metavar="S", help="and so many seconds later, within a step")
    parser.add_argument("--victims", choices=("one", "two"), default="one", help="how many workers at once")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--again", type=float, metavar="S", help="strike again S seconds later, within the recovery")
    again.add_argument("--during", metavar="PHASE", help="strike again in this phase of the recovery, or at this event")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compare", action="store_true", help="do not train an undisturbed run")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="-- KEY=VALUE")
    return parser.parse_args()


def main() -> int:
    """Returns the exit code."""
    parsed = arguments()
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=in_memory) as memory:
        folder, undisturbed, problems = Path(name), [], []
        with started(parsed, folder / "disturbed", Path(memory, "disturbed")) as run:
            try:
                bench = disturb(parsed, run, Path(memory, "disturbed"))
            except StuckError as error:
                print(f"{(folder / 'disturbed' / 'log.txt').read_text(errors='replace')[-6000:]}\n{error}")
                return 1
        if not parsed.no_compare:
            with started(parsed, folder / "undisturbed", Path(memory, "undisturbed")) as right:
                problems = compare(parsed, run, right)
                undisturbed = steps_of(right.events.rows)
        report(parsed, bench, undisturbed=undisturbed, problems=problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
