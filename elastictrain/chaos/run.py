"""Trains a run, lets the faults of a plan happen to it, and gathers what is known of it."""

import heapq
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import psutil

from elastictrain.chaos.blame import Struck, followed_by
from elastictrain.chaos.damage import committed, generation_of
from elastictrain.chaos.fleet import processes_on
from elastictrain.chaos.injectors import Injectors, NoTargetError
from elastictrain.chaos.invariants import (
    ENDS_GENERATION,
    ChaosFacts,
    CommitFact,
    GenerationFact,
    Invariant,
    ResumeFact,
    Usage,
    Violation,
    check,
)
from elastictrain.chaos.plan import ChaosKind, FaultPlan, PlannedFault
from elastictrain.chaos.processes import StuckError, savers
from elastictrain.chaos.run_events import generation_facts
from elastictrain.errors import EXIT_CONFIG, EXIT_USAGE, ConfigError
from elastictrain.events import event_time
from elastictrain.report.failures import FailureRecord
from elastictrain.report.history import EventReader, History
from elastictrain.report.summary import RunReport, summarize
from elastictrain.storage.opening import open_store

GOES_ON_WITHIN_S = 180.0
_POLL_S = 0.05
_SETTLED_STEPS = 3  # one may have been in flight, and one may be done before a loss is noticed
_ORPHAN_S = 75.0  # a saver that no worker has ever connected to waits for a minute
_NOTICED = ENDS_GENERATION | {ChaosKind.FLIP_GRADIENT, ChaosKind.FLIP_SNAPSHOT, ChaosKind.FLIP_REPLICA, ChaosKind.FLIP_SHARD}
_NOTICED_WITHIN_S = 40.0
_SPOILS = frozenset((ChaosKind.FLIP_SNAPSHOT, ChaosKind.FLIP_REPLICA, ChaosKind.FLIP_GRADIENT))
_ALLOWED = {"open files": 25.0, "threads": 12.0, "MB": 80.0}

Teller = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    struck: list[Struck]
    passed_over: list[str]  # faults that found no target
    not_injected: PlannedFault | None  # the one whose injector has raised, which ends the run
    violations: list[Violation]
    facts: ChaosFacts
    report: RunReport
    failures: dict[int, FailureRecord]  # what the nth fault was followed by
    absent_s: Mapping[str, float]  # how long each host was away


@dataclass(slots=True)
class ChaosRun:
    """One run. `strict`: faults come at their times even where training has not gone on since the one before."""

    injectors: Injectors
    plan: FaultPlan
    tell: Teller
    strict: bool = False
    ends_s: float = float("inf")  # of the run, from its first steps on
    judged: bool = True  # whether invariants must hold: a plain loop promises none
    own_name: str = ""  # what the run calls the only host, where that is not its name in the plan
    struck: list[Struck] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    not_injected: PlannedFault | None = None
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _absent: dict[str, float] = field(default_factory=dict)
    _absent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _codes: dict[str, int] = field(default_factory=dict)
    _revived: dict[str, float] = field(default_factory=dict)
    _commits: dict[tuple[int, int], CommitFact] = field(default_factory=dict)
    _usage: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _begins_s: float = 0.0  # 0: not all hosts have trained yet
    _reader: EventReader | None = None

    def run(self) -> ChaosOutcome:
        """From start to stop; what raises is a violation. Raises: ConfigError before all hosts have trained."""
        violations, orphans = list[Violation](), list[str]()
        with self._judging(violations):
            self._begin()
            for fault in self._coming():
                self._act(fault)
                violations += check(self._facts()) if self.judged else []
                if violations:
                    break
            else:
                self._rest()
        with self._judging(violations):
            orphans = self._stop()
        facts = ChaosFacts(orphans=orphans, exit_codes=self._codes)
        with self._judging(violations):
            facts = self._facts(orphans=orphans)
        known = {(one.invariant, one.what) for one in violations}
        violations += [one for one in check(facts) if (one.invariant, one.what) not in known] if self.judged else []
        report, failures = summarize(History(), url=str(self.injectors.fleet.run_dir)), dict[int, FailureRecord]()
        with self._judging(violations):
            report = self._report()
            failures, _ = followed_by(self.struck, report.failures, self._plan_name, alone=len(self.plan.hosts) == 1)
        for name, since_s in self._absent.items():
            self._absent_s[name] += time.monotonic() - since_s
        return ChaosOutcome(
            self.struck, self.passed_over, self.not_injected, violations, facts, report, failures, self._absent_s
        )

    @contextmanager
    def _judging(self, violations: list[Violation]) -> Iterator[None]:
        """What raises in the block is a violation: a soak has a verdict."""
        try:
            yield
        except (StuckError, ConfigError) as error:
            if isinstance(error, ConfigError) and not self._begins_s:
                raise
            violations.append(Violation(Invariant.GOES_ON, str(error)))
        except Exception as error:  # noqa: BLE001
            violations.append(own_failure(error))

    def _begin(self) -> None:
        for name in self.plan.hosts:
            self.injectors.start(name)
        fleet = self.injectors.fleet
        self._wait(
            lambda: (self.strict or self._whole()) and fleet.last_step() >= _SETTLED_STEPS, "the first steps of all hosts"
        )
        self._begins_s = time.monotonic()

    def _coming(self) -> Iterator[PlannedFault]:
        """Each fault when it is due. Where training must have gone on before the next, the pause between two begins then."""
        faults = sorted(self.plan.faults, key=lambda one: (one.step or 0, one.at_s or 0.0))
        last_at_s, last_s = 0.0, self._begins_s
        for fault in faults:
            at_s = fault.at_s if fault.at_s is not None else last_at_s
            due_s = self._begins_s + at_s if self.strict else last_s + at_s - last_at_s
            step = fault.step or 0
            self._wait(
                lambda due_s=due_s, step=step: (  # type: ignore[misc]
                    self._is_over() or (time.monotonic() >= due_s and self.injectors.fleet.last_step() >= step)
                ),
                f"step {fault.step}" if fault.step else "the next fault",
                limit_s=due_s - time.monotonic() + GOES_ON_WITHIN_S,
            )
            if self._is_over():
                return
            yield fault
            last_at_s, last_s = at_s, time.monotonic()

    def _is_over(self) -> bool:
        return time.monotonic() - self._begins_s > self.ends_s

    def _act(self, fault: PlannedFault) -> None:
        fleet, began_s, time_s = self.injectors.fleet, time.monotonic(), event_time()
        generation = self._generation()
        try:
            strike = self.injectors.strike(fault)
        except NoTargetError as error:
            self.passed_over.append(f"{fault}: {error}")
            self.tell(f"{fault.kind:14} passed over: {error}")
            return
        except Exception as error:
            self.not_injected = fault
            raise StuckError(f"{fault}: could not be injected:\n{_trace(error)}") from error
        # It is in the verdict, too, where training does not go on after it.
        self.struck.append(Struck(fault, generation, strike.rank, None, time_s))
        known = fleet.events.last_step
        for name in strike.absent:
            self._leaves(name)
        if strike.repair is not None:
            self._later(began_s + strike.lasts_s, self._repaired(strike.repair, strike.absent))
        if strike.taken_s is not None and strike.taken_s < strike.lasts_s:
            self._later(began_s + strike.taken_s, lambda: self.injectors.take_away(fault.host))
        recovered_s = None
        if not self.strict:
            self._wait(lambda: not self._due, "the end of the fault", limit_s=strike.lasts_s + GOES_ON_WITHIN_S)
            if fault.kind in _NOTICED:
                with suppress(StuckError):
                    self._wait(lambda: self._generation() > generation, "its end", limit_s=_NOTICED_WITHIN_S)
            known = max(known, fleet.last_step() if strike.repair else 0)
            self._wait(lambda: self._whole() and fleet.last_step() >= known + _SETTLED_STEPS, f"training after {fault}")
            recovered_s = time.monotonic() - began_s
            self._sample()
            self.struck[-1] = replace(self.struck[-1], recovered_s=recovered_s)
        on = f" {fault.host}" if fault.host else ""
        went_on = f"went on after {recovered_s:5.1f} s, " if recovered_s is not None else ""
        self.tell(f"{len(self.struck):4d} {fault.kind:14}{on}: {went_on}step {fleet.last_step()}")

    def _rest(self) -> None:
        """What is due yet; the end of the time; and training, if there is anybody to train."""
        now_s = time.monotonic()
        self._wait(
            lambda: not self._due, "the last repair", limit_s=max((one[0] - now_s for one in self._due), default=0.0) + 1
        )
        if self.ends_s < float("inf"):
            self._wait(self._is_over, "the end", limit_s=self.ends_s + GOES_ON_WITHIN_S)
        known = self.injectors.fleet.last_step()
        if not self.strict:
            self._wait(lambda: self.injectors.fleet.last_step() >= known + _SETTLED_STEPS, "the last steps")

    def _stop(self) -> list[str]:
        """Ask all hosts to leave; returns who is left on them a while after."""
        fleet = self.injectors.fleet
        self._due.clear()
        for name in self.plan.hosts:
            self.injectors.stop(name)
        for name, launcher in fleet.launchers.items():
            if name in self._absent:
                continue
            with suppress(StuckError):
                code = launcher.wait(GOES_ON_WITHIN_S)
                # One that was just started has not imported what takes signals.
                if code != -signal.SIGTERM or launcher.output():
                    self._codes[f"{name} (at the end)"] = code
        # A saver writes what storage lacks after its launcher has ended.
        deadline = time.monotonic() + _ORPHAN_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return left

    def _left(self) -> list[str]:
        return [
            f"process {one.pid} on {name}: {' '.join(_words(one))[:100]}"
            for name, host in self.injectors.hosts.items()
            for one in processes_on(host)
        ]

    def _leaves(self, name: str) -> None:
        self._absent.setdefault(name, time.monotonic())

    def _repaired(self, repair: Callable[[], None], absent: tuple[str, ...]) -> Callable[[], None]:
        def act() -> None:
            repair()
            for name in absent:
                self._absent_s[name] += time.monotonic() - self._absent.pop(name, time.monotonic())

        return act

    def _later(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, time.monotonic_ns(), act))

    def _wait(self, condition: Callable[[], object], what: str, *, limit_s: float = GOES_ON_WITHIN_S) -> None:
        """Do what is due until the condition holds. Raises: StuckError."""
        until_s = time.monotonic() + max(1.0, limit_s)
        while not condition():
            if time.monotonic() > until_s:
                raise StuckError(f"{what} did not come within {limit_s:.0f} s")
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            self._revive()
            self._see_commits()
            time.sleep(_POLL_S)

    def _revive(self) -> None:
        """Start launchers that have ended by themselves, as whoever watches over them would."""
        for name, launcher in self.injectors.fleet.launchers.items():
            code = None if name in self._absent else launcher.process.poll()
            if code is not None and time.monotonic() - self._revived.get(name, 0.0) > 1.0:
                self._revived[name] = time.monotonic()
                self._codes[f"{name} ({launcher.log.stem})"] = code
                if code in (EXIT_USAGE, EXIT_CONFIG):
                    why = launcher.output().strip().rpartition("\n")[2].removeprefix("elastictrain: ")
                    if not self._begins_s:
                        raise ConfigError(why)
                    raise StuckError(f"the launcher of {name} has ended with {code}, and no other can help: {why}")
                self.tell(f"     the launcher of {name} has ended with {code}, and is started again")
                self.injectors.start(name)

    def _whole(self) -> bool:
        """Whether all hosts that are there train together."""
        there = sorted(name for name in self.plan.hosts if name not in self._absent)
        return sorted(map(self._plan_name, self.injectors.fleet.members())) == there

    def _plan_name(self, text: str) -> str:
        """A name of the run, or a sentence with it, as the plan has it."""
        return text.replace(self.own_name, self.plan.hosts[0]) if self.own_name else text

    def _generation(self) -> int:
        folder = self.injectors.fleet.run_dir / "launch" / "generations"
        return max((generation_of(path.stem) for path in folder.glob("*.json")), default=0)

    def _see_commits(self) -> None:
        for at_s, generation, step, _ in committed(self.injectors.fleet.run_dir):
            self._commits.setdefault((generation, step), CommitFact(at_s, generation, step))

    def _sample(self) -> None:
        """The most that any process of a kind uses."""
        kinds: dict[str, list[psutil.Process]] = defaultdict(list)
        for host in self.injectors.hosts.values():
            kinds["saver"] += savers(host.memory)
            for one in processes_on(host, "-m"):
                kinds[_words(one)[2].rpartition(".")[2]].append(one)
        for kind, processes in kinds.items():
            figures: dict[str, float] = defaultdict(float)
            for one in processes:
                with suppress(psutil.Error), one.oneshot():
                    figures["open files"] = max(figures["open files"], one.num_fds())
                    figures["threads"] = max(figures["threads"], one.num_threads())
                    figures["MB"] = max(figures["MB"], one.memory_info().rss / 1e6)
            for figure, value in figures.items():
                self._usage[(kind, figure)].append(value)

    def _report(self) -> RunReport:
        self._reader = self._reader or EventReader(open_store(str(self.injectors.fleet.run_dir)))
        return summarize(self._reader.update(), url=str(self.injectors.fleet.run_dir))

    def _facts(self, *, orphans: list[str] | None = None) -> ChaosFacts:
        """What is known by now, without what the undisturbed run tells."""
        self._see_commits()
        rows = self.injectors.fleet.events.update()
        folder = self.injectors.fleet.run_dir / "launch" / "generations"
        made = {generation_of(path.stem): path.stat().st_mtime for path in folder.glob("*.json")}
        resumed = {generation_of(row["incarnation"]): row["step"] for row in rows if row["event"] == "resume"}
        _, blamed = followed_by(self.struck, self._report().failures, self._plan_name, alone=len(self.plan.hosts) == 1)
        return ChaosFacts(
            commits=[*self._commits.values()],
            resumes=[ResumeFact(made[number], number, step) for number, step in resumed.items() if number in made],
            generations=self._generations(),
            damaged=self.injectors.damaged,
            blamed=blamed,
            usage=[Usage(f"{kind}, {what}", values, _ALLOWED[what]) for (kind, what), values in self._usage.items()],
            orphans=orphans or [],
            exit_codes=self._codes,
        )

    def _generations(self) -> list[GenerationFact]:
        fleet, spoilt = self.injectors.fleet, {one.generation for one in self.struck if one.fault.kind in _SPOILS}
        return generation_facts(fleet.generations(), savers=fleet.events.savers, spoilt=spoilt)


def own_failure(error: Exception) -> Violation:
    """Of chaos itself, while it disturbs a run or judges it."""
    return Violation(Invariant.GOES_ON, f"chaos has failed, which is a bug of its own:\n{_trace(error)}")


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return [*process.cmdline(), "", "", ""]
    return ["", "", ""]
