"""`python -m elastictrain.chaos`: break a run on purpose, by a plan from a seed or a trace, and check what must still hold.

As root it makes hosts of its own, network namespaces on this machine; otherwise this machine is the only host, and fewer faults
are possible. KEY=VALUE after `--` replaces keys of the run. Exit codes: 0; 70 an invariant is broken.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastictrain.chaos.arena import ChaosArena, temporary_folder
from elastictrain.chaos.fleet_faults import fault_history
from elastictrain.chaos.injectors import left_out
from elastictrain.chaos.invariants import Invariant, Violation, check
from elastictrain.chaos.network.namespaces import unavailable
from elastictrain.chaos.output import ComparedRun, comparison, culprits_line, kinds_table
from elastictrain.chaos.plan import ChaosKind, FaultPlan, plan_of_trace, read_plan, seeded_plan, write_plan
from elastictrain.chaos.processes import StuckError
from elastictrain.chaos.run import ChaosOutcome, ChaosRun, Teller, own_failure
from elastictrain.chaos.shrink import shrink
from elastictrain.chaos.undisturbed import CHANGING_WORLD, with_undisturbed
from elastictrain.entry_point import run_command, split_program
from elastictrain.errors import EXIT_BUG, EXIT_OK, ElasticTrainError, UsageError
from elastictrain.report.__main__ import parse_price
from elastictrain.report.output import as_text
from elastictrain.report.page import page
from elastictrain.simulate.faults import read_trace, write_history

ATTRIBUTED = 0.995
_SIMULATED = frozenset(("simulated", "seed", "faults", "kinds", "plan"))  # options that a simulated plan has
_WHEREVER = "of a run that nothing happened to"


def main(arguments: Sequence[str] | None = None) -> int:
    own, overrides = split_program(sys.argv[1:] if arguments is None else arguments)
    return run_command(_parser(), own, partial(_chaos, overrides=overrides))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastictrain.chaos",
        usage="%(prog)s [options] [-- KEY=VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, metavar="N", help="of the plan (1)")
    add("--faults", type=int, default=0, metavar="N", help="how many (0: as many as come in --minutes)")
    add(
        "--minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="stop then, whatever is left of the plan (5, or all of --faults)",
    )
    add("--kinds", nargs="+", choices=[str(kind) for kind in ChaosKind], metavar="KIND", help=", ".join(ChaosKind))
    add("--every", nargs=2, type=float, default=(5.0, 15.0), metavar="S", help="least and most time between faults (5 15)")
    add("--hosts", type=int, default=3, metavar="N", help="hosts of their own, as root (3)")
    add("--workers", type=int, default=0, metavar="N", help="of each host (1; 3 where there is one host)")
    add("--trace", type=Path, metavar="FILE", help="hosts come and go as in this file, instead of faults by chance")
    add("--faster", type=float, default=100.0, metavar="X", help="by how much the time of the trace is compressed (100)")
    add("--noticed", type=float, default=1.0, metavar="SHARE", help="of the hosts that a trace takes away: told before (1)")
    add("--notice", type=float, default=10.0, metavar="S", help="how long before, not compressed (10)")
    add("--replay", type=Path, metavar="PLAN.json", help="carry out a plan that was written before")
    add("--plan", type=Path, metavar="FILE", help="where the plan is written (chaos-SEED.json)")
    add(
        "--simulated",
        action="store_true",
        help="play the faults in this process, on storage, disks and memory that are simulated",
    )
    add("--against", choices=["torchrun"], help="afterwards, the same plan with a plain loop under torchrun")
    add("--price", type=_price, metavar="2.49/gpu-hour", help="of a worker that is there")
    add("--html", type=Path, metavar="FILE", help="write the report's page")
    add("--keep", type=Path, metavar="DIR", help="a new folder for the run, its logs and its events, which stay")
    add("--shrink-minutes", type=float, default=10.0, metavar="M", help="look for the shortest plan that fails so long (10)")
    return parser


def _price(text: str) -> float:
    found = parse_price(text)
    if not isinstance(found, float):
        raise argparse.ArgumentTypeError(f"must be one price for all hosts, like 2.49/gpu-hour, but is {text!r}")
    return found


@dataclass(frozen=True, slots=True)
class _Trial:
    """How plans are carried out."""

    arena: ChaosArena
    strict: bool
    ends_s: float
    tell: Teller

    def carry_out(self, plan: FaultPlan, folder: Path, *, plain: bool = False) -> tuple[ChaosOutcome, float]:
        """The outcome, and the seconds until then. `plain`: a plain loop under torchrun, neither judged nor compared."""
        began_s, outcome = time.monotonic(), None
        try:
            with self.arena.opened(folder, plain=plain) as injectors:
                run = ChaosRun(injectors, plan, self.tell, strict=self.strict or plain, own_name=self.arena.own_name)
                run.ends_s, run.judged = self.ends_s, not plain
                outcome = run.run()
                seconds = time.monotonic() - began_s
                if not plain and not any(one.invariant is Invariant.GOES_ON for one in outcome.violations):
                    outcome.violations.extend(self._compared(outcome, injectors.fleet.run_dir, folder))
        except Exception as error:
            if outcome is None:
                raise
            # What is known already must not be lost.
            outcome.violations.append(own_failure(error))
        return outcome, seconds

    def _compared(self, outcome: ChaosOutcome, run_dir: Path, folder: Path) -> list[Violation]:
        """What differs from the undisturbed run."""
        self.tell(f"training {outcome.report.steps} steps without faults, to compare")
        try:
            right = self.arena.undisturbed(folder / "undisturbed", steps=outcome.report.steps)
        except StuckError as error:
            return [Violation(Invariant.SAME_LOSSES, f"nothing to compare with: {error}")]
        tolerance = 0.0 if self.arena.alone else CHANGING_WORLD
        spoilt = {one.generation for one in outcome.struck if one.fault.kind is ChaosKind.FLIP_GRADIENT}
        facts = with_undisturbed(outcome.facts, run_dir=run_dir, undisturbed=right, tolerance=tolerance, spoilt=spoilt)
        return [one for one in check(facts) if one.invariant in (Invariant.SAME_LOSSES, Invariant.SAMPLES_ONCE)]

    def fails(self, plan: FaultPlan, *, like: Sequence[Invariant], until_s: float) -> bool:
        """Whether it breaks one of the same invariants; no plan does after `until_s`."""
        if time.monotonic() > until_s:
            return False
        self.tell(f"a plan with {len(plan.faults)} of the faults:")
        with temporary_folder() as name:
            outcome, _ = self.carry_out(plan, Path(name))
        return any(one.invariant in like for one in outcome.violations)


def _chaos(parsed: argparse.Namespace, *, overrides: Sequence[str]) -> int:
    if parsed.simulated:
        return _simulate(parsed, overrides)
    # Whoever ends this ends what it has started, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    alone = "there is one host" if parsed.hosts == 1 and parsed.replay is None else unavailable() or ""
    plan, strict, ends_s = _plan(parsed, alone)
    alone = alone or ("there is one host" if len(plan.hosts) == 1 else "")
    wrong = [word for word in overrides if "=" not in word]
    if wrong:
        raise UsageError(f"arguments after `--` must be KEY=VALUE, but one is {wrong[0]!r}")
    given = dict(word.partition("=")[::2] for word in overrides)
    checked = {"preflight": "off"} if not any(one.kind is ChaosKind.WRONG_VERSION for one in plan.faults) else {}
    small_disk = any(one.kind is ChaosKind.FULL_DISK for one in plan.faults)
    arena = ChaosArena(plan.hosts, plan.workers, checked | given, alone=alone, small_disk=small_disk)
    file = parsed.plan or Path(f"chaos-{plan.seed}.json")
    _write(file, write_plan(plan), "--plan")
    _print(f"{len(plan.faults)} faults on {len(plan.hosts)} host(s) of {plan.workers} worker(s), written to {file}")
    trial = _Trial(arena, strict, ends_s, _print)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(temporary_folder())) if parsed.keep is None else _new_folder(parsed.keep)
        outcome, seconds = trial.carry_out(plan, folder / "run")
        try:
            try:
                _tell(outcome, parsed)
                if parsed.against is not None:
                    other = trial.carry_out(plan, folder / "torchrun", plain=True)
                    _compare(plan, (outcome, seconds), other, price=parsed.price)
                if parsed.keep is not None and not alone:
                    _keep(outcome, plan, folder)
            finally:
                _conclude(outcome, file)
            if outcome.violations and parsed.shrink_minutes and len(plan.faults) > 1:
                _shorten(trial, plan, outcome, file=file, until_s=time.monotonic() + 60 * parsed.shrink_minutes)
        except ElasticTrainError as error:
            # What cannot be written is no verdict.
            if not outcome.violations:
                raise
            sys.stderr.write(f"elastictrain: {error}\n")
    return EXIT_BUG if outcome.violations else EXIT_OK


def _simulate(parsed: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Exit code. Raises: UsageError, also for options that have no effect here."""
    from elastictrain.chaos.simulated import KINDS, run_simulated

    usual = vars(_parser().parse_args([]))
    unused = [
        f"--{name.replace('_', '-')}" for name, value in vars(parsed).items() if name not in _SIMULATED and value != usual[name]
    ]
    if unused or overrides:
        raise UsageError(f"--simulated takes --seed, --faults, --kinds and --plan, but not {', '.join([*unused, *overrides])}")
    kinds = tuple(map(ChaosKind, parsed.kinds or ())) or KINDS
    if strange := [str(one) for one in kinds if one not in KINDS]:
        raise UsageError(f"--simulated knows no {', '.join(strange)}; it knows {', '.join(KINDS)}")
    if parsed.faults < 0:
        raise UsageError(f"--faults must be >= 0, but is {parsed.faults}")
    shortest = run_simulated(faults=parsed.faults or 1000, seed=parsed.seed, kinds=kinds, tell=_print)
    if shortest is None:
        return EXIT_OK
    file = parsed.plan or Path(f"chaos-{parsed.seed}.json")
    _write(file, write_plan(shortest), "--plan")
    _print(f"written to {file}")
    return EXIT_BUG


def _plan(parsed: argparse.Namespace, alone: str) -> tuple[FaultPlan, bool, float]:
    """The plan, whether its times are strict, and when the run ends. Raises: UsageError."""
    if parsed.replay is not None:
        try:
            plan = read_plan(parsed.replay.read_text(encoding="utf-8"), name=str(parsed.replay))
        except (OSError, ValueError) as error:
            raise UsageError(f"--replay must be a file that can be read, but {parsed.replay} is not: {error}") from None
        missing = left_out([one.kind for one in plan.faults], hosts=len(plan.hosts), workers=plan.workers, alone=alone)
        if missing or (alone and len(plan.hosts) > 1):
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in missing.items()) or alone
            raise UsageError(f"{parsed.replay} cannot be carried out here: {reasons}")
        return plan, plan.strict, _ends_s(parsed, plan)
    for name, least in (("hosts", 1), ("faults", 0), ("minutes", 0), ("workers", 0), ("notice", 0)):
        if getattr(parsed, name) < least:
            raise UsageError(f"--{name} must be >= {least}, but is {getattr(parsed, name):g}")
    hosts = 1 if alone else parsed.hosts
    workers = parsed.workers or (3 if hosts == 1 else 1)
    if parsed.trace is not None:
        if alone:
            raise UsageError(f"--trace must have hosts of their own, but there are none: {alone}")
        until_s = 60 * (parsed.minutes or 5.0)
        counts = read_trace(parsed.trace)
        first_s = next(second for second, count in counts if count)
        plan = plan_of_trace(
            [(second - first_s, count) for second, count in counts if second >= first_s],
            hosts=hosts,
            workers=workers,
            until_s=until_s,
            seed=parsed.seed,
            faster=parsed.faster,
            notice_s=parsed.notice,
            noticed=parsed.noticed,
        )
        return replace(plan, strict=True), True, until_s
    kinds = [ChaosKind(kind) for kind in parsed.kinds] if parsed.kinds else [*ChaosKind]
    for kind, reason in (missing := left_out(kinds, hosts=hosts, workers=workers, alone=alone)).items():
        _print(f"left out: {kind} ({reason})")
    kinds = [kind for kind in kinds if kind not in missing]
    until_s = 60 * (parsed.minutes or (0.0 if parsed.faults else 5.0)) or float("inf")
    plan = seeded_plan(
        parsed.seed,
        hosts=hosts,
        workers=workers,
        count=parsed.faults,
        until_s=until_s,
        kinds=kinds,
        every_s=tuple(parsed.every),
    )
    return plan, False, until_s


def _ends_s(parsed: argparse.Namespace, plan: FaultPlan) -> float:
    if parsed.minutes:
        return 60.0 * float(parsed.minutes)
    return (
        max((one.at_s + one.lasts_s for one in plan.faults if one.at_s is not None), default=0.0)
        if plan.strict
        else float("inf")
    )


def _tell(outcome: ChaosOutcome, parsed: argparse.Namespace) -> None:
    _print("\n".join(["", *kinds_table(outcome.struck, outcome.failures), ""]))
    if outcome.passed_over:
        _print(f"{len(outcome.passed_over)} faults found no target")
    _print("\n".join(as_text(replace(outcome.report, url="the run"), price=parsed.price)) + "\n")
    wrong = sum(one.invariant is Invariant.RIGHT_CULPRIT for one in outcome.violations)
    _print(culprits_line(outcome.struck, outcome.failures, wrong=wrong))
    if parsed.html is not None:
        _write(parsed.html, page([replace(outcome.report, url="runs/chaos")], price=parsed.price), "--html")


def _compare(
    plan: FaultPlan, ours: tuple[ChaosOutcome, float], other: tuple[ChaosOutcome, float], *, price: float | None
) -> None:
    runs = []
    for name, (outcome, seconds) in (("elastictrain", ours), ("torchrun", other)):
        whole_s = seconds * len(plan.hosts) * plan.workers
        present_s = whole_s - plan.workers * sum(outcome.absent_s.values())
        runs.append(ComparedRun.of(name, outcome.report, whole_s=whole_s, present_s=present_s))
    _print("\n".join(["", *comparison(runs, price=price)]))


def _keep(outcome: ChaosOutcome, plan: FaultPlan, folder: Path) -> None:
    report = outcome.report
    history = fault_history(outcome.struck, outcome.failures, hosts=plan.hosts, begin_s=report.begin, end_s=report.end)
    _write(folder / "history.json", write_history(history), "--keep")


def _conclude(outcome: ChaosOutcome, file: Path) -> None:
    _print(f"carry it out again: python -m elastictrain.chaos --replay {file}")
    for violation in outcome.violations:
        _print(f"BROKEN {violation}")
    if not outcome.violations:
        _print(f"all held: {len(outcome.struck)} faults, and the losses and samples {_WHEREVER}")


def _shorten(trial: _Trial, plan: FaultPlan, outcome: ChaosOutcome, *, file: Path, until_s: float) -> None:
    """Make a plan that has broken something as short as it can be in the time for that."""
    like = [one.invariant for one in outcome.violations]
    came = [one.fault for one in outcome.struck] + ([outcome.not_injected] if outcome.not_injected is not None else [])
    shrunk = shrink(
        plan.of(*came) if len(came) < len(plan.faults) else plan, lambda one: trial.fails(one, like=like, until_s=until_s)
    )
    shortest = file.with_suffix(".shortest.json")
    _write(shortest, write_plan(shrunk.plan), "--plan")
    _print(f"the shortest plan that fails, of {shrunk.tries} tried, has {len(shrunk.plan.faults)} faults: {shortest}")


def _new_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--keep must name a folder that can be made, but {path} cannot: {error}") from None
    return path.absolute()


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} must name a file that can be written, but {path} is not: {error}") from None


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
