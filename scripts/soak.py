"""Breaks a run on three hosts again and again, by a plan from a seed, and compares it with an undisturbed one at the end.

    sudo .venv/bin/python scripts/soak.py --minutes 30 --seed 1

    sudo .venv/bin/python scripts/soak.py --minutes 5 --kinds worker lost swap --every 8 12 --clock-off 0 -- preflight=default

The hosts are network namespaces on this machine; it needs root. Prints each fault with the time until the next step that nobody
had done before was done, and how many steps were repeated; at the end a table by kind, the report, and whether losses and
ledger are those of a run that nothing happened to. Exit code 1 if they are not.

`swap` is not among the faults that are the default: a host is asked to leave, and a fourth one waits to take its place.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / one) for one in ("", "scripts", "tests/network", "tests/process")]

from fleet import Fleet, launcher_of, workers  # noqa: E402
from hosts import Host, Network  # noqa: E402
from recovery_report import last_step as newest  # noqa: E402
from recovery_report import steps_of  # noqa: E402
from recovery_run import Events  # noqa: E402
from torchruns import TINY, events, kill, last_step, train, wait_until  # noqa: E402

from elastictrain.data.ledger import fold, read_ledger  # noqa: E402
from elastictrain.report.history import EventReader  # noqa: E402
from elastictrain.report.output import as_text  # noqa: E402
from elastictrain.report.page import page  # noqa: E402
from elastictrain.report.summary import summarize  # noqa: E402
from elastictrain.storage.opening import open_store  # noqa: E402

NAMES = "abc"
SPARE = "d"
LIMIT_S = 120.0
FLAP_S = (3.0, 10.0)
"""Shorter and longer than `launch.lost_s`."""

EVERY_S = (20.0, 60.0)
RUN = (
    *TINY,
    "optim.schedule=constant",
    # Worlds of two and of three add in another order; at a high rate rounding grows over thousands of steps.
    "optim.lr=1e-4",
    "train.global_batch=8",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=50",
    "data.ledger=true",
    "fault.heartbeat_s=0.2",
    "task._target_=tests.process.paced.PacedLlama",
)
LAUNCH = (
    "train.steps=1000000",
    "task.pause_s=0.05",
    "launch.min_hosts=1",
    "launch.max_hosts=3",
    "launch.join_s=60",
    "launch.grow_after_s=1",
    "launch.grow_every_s=5",
    "launch.notices=false",
)
TOLERANCE = 1e-5
ATTRIBUTED = 0.995


@dataclass(slots=True)
class Soak:
    """A fleet, and what was done to it."""

    fleet: Fleet
    hosts: dict[str, Host]
    chance: random.Random
    events: Events
    recovered_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    repeated: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def strike(self, kind: str) -> None:
        """One fault, the time until training goes on, and everything in its place again."""
        host = self.hosts[self.chance.choice(sorted(self.fleet.members()))]
        generation, began_s = self._generation(), time.monotonic()
        repair = getattr(self, f"_{kind}")(host)
        if kind == "flap":
            # A short one ends no generation.
            known = newest(self.events.look())
            wait_until(lambda: newest(self.events.look()) > known, timeout_s=LIMIT_S, what="a new step")
            repeated = 0
        else:
            repeated = self._wait_for_new_step(generation)
        seconds = time.monotonic() - began_s
        self.recovered_s[kind].append(seconds)
        self.repeated[kind].append(repeated)
        on = "+".join(self.fleet.members())
        print_line(f"{kind:10} on {host.name}: {seconds:5.2f} s, {repeated} repeated, step {newest(self.events.rows)}, on {on}")
        repair()
        wait_until(lambda: len(self.fleet.members()) == len(NAMES), timeout_s=LIMIT_S, what=f"{len(NAMES)} hosts")

    def _generation(self) -> str:
        return max((row["incarnation"] for row in self.events.look()), default="")

    def _wait_for_new_step(self, generation: str) -> int:
        """Wait until one after `generation` has done a step that was new; returns how many it repeated."""
        repeated = 0

        def is_done() -> bool:
            nonlocal repeated
            rows = steps_of(self.events.look())
            after = [row for row in rows if row["incarnation"] > generation]
            last = newest(row for row in rows if after and row["incarnation"] < after[-1]["incarnation"])
            repeated = sum(row["step"] <= newest(one for one in rows if one["incarnation"] <= generation) for row in after)
            return bool(after) and after[-1]["step"] > last

        wait_until(is_done, timeout_s=LIMIT_S, what=f"a new step after {generation}")
        return repeated

    def _present(self) -> set[str]:
        """The addresses of hosts that take part, or wait."""
        records = [json.loads(one.read_text()) for one in (self.fleet.run_dir / "launch" / "hosts").glob("*.json")]
        return {record["address"] for record in records if record["state"] in ("ready", "busy")}

    def _worker(self, host: Host) -> Callable[[], None]:
        kill(workers(host)[0])
        return lambda: None

    def _launcher(self, host: Host) -> Callable[[], None]:
        os.kill(launcher_of(host), signal.SIGKILL)
        return lambda: self.fleet.start(host)

    def _killed(self, host: Host) -> Callable[[], None]:
        host.kill()
        return lambda: self.fleet.start(host)

    def _lost(self, host: Host) -> Callable[[], None]:
        host.lose()

        def replace() -> None:
            host.restore()
            self.fleet.start(host)

        return replace

    def _frozen(self, host: Host) -> Callable[[], None]:
        pids = host.namespaces.inhabitants()
        send(pids, signal.SIGSTOP)
        return lambda: send(pids, signal.SIGCONT)

    def _flap(self, host: Host) -> Callable[[], None]:
        host.cut()
        time.sleep(self.chance.uniform(*FLAP_S))
        host.restore()
        return lambda: None

    def _leave(self, host: Host) -> Callable[[], None]:
        os.kill(launcher_of(host), signal.SIGTERM)

        def replace() -> None:
            code = self.fleet.launchers[host.name].wait(LIMIT_S)
            if code != 75:
                raise AssertionError(f"{host.name} left with {code}:\n{self.fleet.output()[-8000:]}")
            self.fleet.start(host)
            # It can be asked to leave from then on.
            wait_until(lambda: host.address in self._present(), timeout_s=LIMIT_S, what=f"{host.name} to come")

        return replace

    _swap = _leave


KINDS = ("worker", "launcher", "killed", "lost", "frozen", "flap", "leave")
SWAP = "swap"


def main() -> int:
    """Soak, and judge; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, SWAP), default=KINDS, help="faults (default: all but swap)")
    parser.add_argument("--every", type=float, nargs=2, default=EVERY_S, metavar="S", help="least and most time between faults")
    parser.add_argument("--clock-off", type=float, default=10.0, metavar="S", help="how wrong the clock of the last host is")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report's page")
    parser.add_argument("overrides", nargs="*", metavar="-- KEY=VALUE")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Network(Path(name) / "network") as network:
        return soak(network, Path(name), parsed)


def soak(network: Network, folder: Path, parsed: argparse.Namespace) -> int:
    """One run from start to stop."""
    hosts = {name: network.add(name) for name in (NAMES + SPARE if SWAP in parsed.kinds else NAMES)}
    fleet = Fleet(folder / "run", folder / "logs", [*RUN, *LAUNCH, *parsed.overrides])
    hooks = wrong_clock(folder, seconds=parsed.clock_off)
    for name, host in hosts.items():
        fleet.start(host, environment={"PYTHONPATH": f"{hooks}:{ROOT}"} if name == NAMES[-1] else {})
    chance = random.Random(parsed.seed)
    plan = Soak(fleet, hosts, chance, Events(fleet.run_dir))
    fleet.wait_for_step(3, timeout_s=LIMIT_S)
    wait_until(lambda: len(fleet.members()) == len(NAMES), timeout_s=LIMIT_S, what=f"{len(NAMES)} hosts")
    ends_s = time.monotonic() + 60 * parsed.minutes
    kinds: list[str] = []
    while time.monotonic() < ends_s:
        # Every kind before any comes again.
        kinds = kinds or chance.sample(parsed.kinds, len(parsed.kinds))
        time.sleep(chance.uniform(*parsed.every))
        plan.strike(kinds.pop())
    for host in hosts.values():
        os.kill(launcher_of(host), signal.SIGTERM)
    codes = fleet.wait(timeout_s=LIMIT_S)
    attributed = report(plan, html=parsed.html)
    problems = [] if set(codes.values()) == {75} else [f"exit codes {codes}"]
    problems += [] if attributed >= ATTRIBUTED else [f"{attributed:.2%} of the time of workers is attributed"]
    problems += compare(fleet.run_dir, folder)
    if left := [pid for host in hosts.values() for pid in host.namespaces.inhabitants()]:
        problems.append(f"processes left: {left}")
    for problem in problems:
        print_line(problem)
    print_line("the same run as an undisturbed one" if not problems else "NOT the same run")
    return 1 if problems else 0


def report(plan: Soak, *, html: Path | None) -> float:
    """The table by kind, and what the time was spent on; the same as a page. Returns how much of it is attributed."""
    print_line(f"{'kind':10} {'times':>5} {'median s':>9} {'longest s':>10} {'repeated, median':>17} {'most':>5}")
    for kind, seconds in sorted(plan.recovered_s.items()):
        middle, most = statistics.median(plan.repeated[kind]), max(plan.repeated[kind])
        print_line(f"{kind:10} {len(seconds):5d} {statistics.median(seconds):9.2f} {max(seconds):10.2f} {middle:17g} {most:5d}")
    found = summarize(EventReader(open_store(str(plan.fleet.run_dir))).update(), url="runs/soak")
    if html is not None:
        html.write_text(page([found], price=None), encoding="utf-8")
    print_line("\n".join(as_text(found, price=None)))
    return found.attributed


def compare(run_dir: Path, folder: Path) -> list[str]:
    """What differs from a run that nothing happened to."""
    done = last_step(run_dir)
    undisturbed = folder / "undisturbed"
    train([*RUN, f"train.steps={done}", f"run.dir={undisturbed}/run"], world_size=1, folder=undisturbed, timeout_s=1800)
    right = {row["step"]: row["loss"] for row in events(undisturbed / "run", "step")}
    wrong = [
        f"step {row['step']}: loss {row['loss']}, undisturbed {right[row['step']]}"
        for row in events(run_dir, "step")
        if abs(row["loss"] - right[row["step"]]) > TOLERANCE * abs(right[row["step"]])
    ]
    missing = sorted(set(right) - {row["step"] for row in events(run_dir, "step")})
    ledgers = [fold(list(read_ledger(open_store(str(path))))) for path in (run_dir, undisturbed / "run")]
    problems = wrong[:5] + ([f"steps without an event: {missing[:5]}"] if missing else [])
    return problems + ([] if ledgers[0] == ledgers[1] else ["the ledgers differ"])


def wrong_clock(folder: Path, *, seconds: float) -> Path:
    """A folder for PYTHONPATH that makes the wall clock of whoever has it wrong."""
    hooks = folder / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n")
    return hooks


def send(pids: Sequence[int], number: int) -> None:
    """A signal to each that still lives."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def print_line(text: str) -> None:
    """To the terminal, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
