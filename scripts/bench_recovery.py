"""What it costs when workers of a run die: kills them by a plan from a seed, and compares the run with an undisturbed one.

    python scripts/bench_recovery.py --workers 2 --kills 20 [-- data=stdlib train.compile=false ...]
    python scripts/bench_recovery.py --recipe llama_fsdp --workers 4 --kills 5 --every 60 -- data=stdlib
    python scripts/bench_recovery.py --workers 8 --calm 60 -- checkpoint.snapshot_every_steps=5 checkpoint.every_steps=20

Starts `python -m elastictrain.launch recipe=...` on this machine. After each kill it prints the time until the next step that
no process had done before, how many steps were repeated, and how many survivors kept their process; at the end the same by kind
of recovery, the goodput, what grew, and whether losses and ledger (`-- data.ledger=true`) are those of a run that nothing
happened to. Exit code 1 if they are not. The goodput is that of
`python -m elastictrain.report`: the first start counts, too.

On GPUs losses are equal with `run.deterministic=true` only. Both runs and their checkpoints are in TMPDIR until the end. Deaths
without a newly committed step between them count as failures: with many in a row set `launch.max_failures`.

With `--calm S` nobody is killed: it trains for S seconds, and prints how long saves held training up (by the events of rank 0)
and how regular heartbeats were (in the ranks' store, and as the rank monitor sees them).
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from recovery_calm import calm_table, stalls, watch  # noqa: E402
from recovery_report import (  # noqa: E402
    Outcome,
    Row,
    Sample,
    Strike,
    differences,
    growth,
    growth_table,
    judge,
    ledger_differences,
    new_step,
    table,
    usual_step_s,
)
from recovery_run import Run, reached, sample, started  # noqa: E402

from elastictrain.chaos.processes import StuckError  # noqa: E402
from elastictrain.chaos.run_events import last_step, steps_of  # noqa: E402
from elastictrain.data.ledger import fold, read_ledger  # noqa: E402
from elastictrain.events import event_time  # noqa: E402
from elastictrain.report.history import EventReader  # noqa: E402
from elastictrain.report.summary import summarize  # noqa: E402
from elastictrain.storage.opening import open_store  # noqa: E402

NEVER = "never"
MOMENT_LOOK_S = 0.005


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
        now = event_time()
        for rank in ranks:
            with suppress(psutil.Error):
                workers[rank].send_signal(signal.Signals[f"SIG{self.parsed.signal}"])
        if ranks:
            self.strikes.append(Strike(time=now, ranks=ranks, pids={k: one.pid for k, one in workers.items()}, during=during))

    def strike_again(self) -> None:
        """The second strike of a turn, if the plan has one."""
        moment = self.chance.choice(self.parsed.during.split(","))
        first, began_s = self.strikes[-1], time.monotonic()
        if moment == NEVER:
            return
        if moment.replace(".", "").isdigit():
            time.sleep(max(0.0, first.time + float(moment) - event_time()))
            # A recovery by new processes has none for a moment.
            self.run.wait(self.run.workers, what="a worker", every_s=MOMENT_LOOK_S)
        else:

            def over() -> bool:
                return new_step(self.run.events.update(), first.time) is not None

            self.run.wait(lambda: reached(self.run, moment, first.time, began_s) or over(), what=moment, every_s=MOMENT_LOOK_S)
            if over():
                print(f"          {moment} was not seen in this recovery")
                return
        self.strike(moment)

    def turn(self) -> None:
        """Strike, and wait until the run makes new steps."""
        before = len(self.strikes)
        self.strike()
        self.strike_again()
        mine = self.strikes[before:]
        self.run.wait(lambda: new_step(self.run.events.update(), mine[-1].time), what="a new step")
        pids = {rank: one.pid for rank, one in self.run.workers().items()}
        self.samples.append(sample(self.run, self.memory))
        for one in mine:
            others = {rank for other in mine if other is not one for rank in other.ranks}
            outcome = judge(one, self.run.events.update(), pids=pids, struck_too=others)
            self.outcomes.append(outcome)
            who = "rank " + " and ".join(map(str, one.ranks)) + (f" at {one.during}" if one.during else "")
            print(
                f"kill {len(self.outcomes):3d}: {who} at step {outcome.last_step}: {outcome.rung}, new step after "
                f"{outcome.new_step_s:.2f} s, {outcome.steps_repeated} repeated, "
                f"{outcome.survivors_kept}/{outcome.survivors} survivors",
                flush=True,
            )

    def pause(self, due_s: float) -> float:
        """Wait for the next turn, which is due at `due_s` (monotonic) with --every; returns when the one after it is."""
        parsed, after = self.parsed, last_step(self.run.events.update())
        if parsed.every is not None:
            self.run.wait(lambda: time.monotonic() >= due_s, what="the next turn", limit_s=float("inf"))
            return due_s + float(parsed.every)
        wanted = after + parsed.steps + self.chance.randrange(parsed.steps) - 1
        self.run.wait(lambda: last_step(self.run.events.update()) >= wanted, what="new steps")
        # Steps are seen as they end, and deaths come at any point of a step.
        newest = steps_of(self.run.events.rows)[-5:]
        step_s = min(later["time"] - earlier["time"] for earlier, later in pairwise(newest))
        time.sleep(parsed.gap + self.chance.uniform(0, step_s))
        return due_s


def disturb(parsed: argparse.Namespace, run: Run, memory: Path) -> Bench:
    """Train, strike by the plan, and stop."""
    bench = Bench(run, parsed, memory, random.Random(parsed.seed))
    run.wait(lambda: last_step(run.events.update()) >= parsed.steps, what="the first steps")
    due_s = time.monotonic() + (parsed.every or 0) / 2
    for _ in range(parsed.kills):
        due_s = bench.pause(due_s)
        bench.turn()
    after = last_step(run.events.update())
    run.wait(lambda: last_step(run.events.update()) >= after + parsed.steps, what="the last steps")
    if (code := run.stop()) not in (0, 75):
        raise StuckError(f"the launcher was asked to stop, and ended with exit code {code}")
    run.events.update()
    return bench


def compare(run: Run, right: Run) -> list[str]:
    """What differs between a run and an undisturbed one, which this trains to the same step."""
    last = last_step(run.events.rows)
    right.wait(
        lambda: last_step(right.events.update()) >= last or right.process.poll() == 0, what=f"step {last}", limit_s=36000
    )
    right.stop()
    problems = differences(run.events.rows, right.events.update())
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
    store = open_store(str(bench.run.folder / "run"))
    share = summarize(EventReader(store).update(), url=store.url).goodput
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


def stay_calm(parsed: argparse.Namespace, run: Run) -> None:
    """Train for a while after the first steps, stop, and print what was measured."""
    run.wait(lambda: last_step(run.events.update()) >= parsed.steps, what="the first steps")
    first = last_step(run.events.rows)
    found = watch(run, seconds=parsed.calm)
    if (code := run.stop()) not in (0, 75):
        raise StuckError(f"the launcher was asked to stop, and ended with exit code {code}")
    rows = run.events.update()
    stalled = stalls(run.folder / "run")
    print(f"{parsed.workers} workers, {os.cpu_count()} CPU cores, steps {first} to {last_step(rows)}, ", end="")
    print(f"usually {usual_step_s(steps_of(rows)):.3f} s each\n\n" + "\n".join(calm_table(found, stalled)))
    if parsed.json:
        figures = {"arguments": vars(parsed), "stalls_s": stalled, "between_s": asdict(found)}
        Path(parsed.json).write_text(json.dumps(figures, indent=1) + "\n")


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
    parser.add_argument(
        "--during",
        default=NEVER,
        metavar="MOMENT",
        help="strike again in this moment of each recovery: a phase of a worker, an event, or seconds after the first strike; "
        f"of several (build,restore,resume,0.2,{NEVER}) one by chance",
    )
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--calm", type=float, metavar="S", help="kill nobody, and measure stalls and heartbeats for S seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compare", action="store_true", help="do not train an undisturbed run")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for the runs, their events and logs, which stay")
    parser.add_argument("overrides", nargs="*", metavar="-- KEY=VALUE")
    parsed = parser.parse_args()
    if parsed.keep and parsed.keep.exists():
        parser.error(f"--keep must be a new folder, but {parsed.keep} is there")
    return parsed


def main() -> int:
    """Returns the exit code."""
    parsed = arguments()
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    fixed = {"recipe": parsed.recipe, "launch.processes": str(parsed.workers), "launch.notices": "false"}
    overrides = fixed | {"train.steps": "100000"} | dict(one.partition("=")[::2] for one in parsed.overrides)
    if parsed.keep:
        parsed.keep.mkdir(parents=True)
    where = nullcontext(parsed.keep) if parsed.keep else tempfile.TemporaryDirectory()
    with where as name, tempfile.TemporaryDirectory(dir=in_memory) as memory:
        folders, memories = ([Path(one, part) for part in ("disturbed", "undisturbed")] for one in (name, memory))
        undisturbed, problems = [], []
        with started(overrides, folders[0], memories[0]) as run:
            try:
                if parsed.calm:
                    stay_calm(parsed, run)
                    return 0
                bench = disturb(parsed, run, memories[0])
            except StuckError as error:
                print(f"{(folders[0] / 'log.txt').read_text(errors='replace')[-6000:]}\n{error}")
                return 1
        if not parsed.no_compare:
            with started(overrides, folders[1], memories[1]) as right:
                problems = compare(run, right)
                undisturbed = steps_of(right.events.rows)
        report(parsed, bench, undisturbed=undisturbed, problems=problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
