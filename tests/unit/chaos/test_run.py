"""What a soak does with launchers, and how it ends: on hosts that have no processes."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Timer

import pytest

from elastictrain.chaos import __main__ as chaos
from elastictrain.chaos import injectors as injectors_module
from elastictrain.chaos.arena import ChaosArena
from elastictrain.chaos.fleet import FleetHost, LauncherFleet
from elastictrain.chaos.in_process import HostControl
from elastictrain.chaos.injectors import Injectors
from elastictrain.chaos.invariants import GenerationFact, Invariant
from elastictrain.chaos.plan import ChaosKind, FaultPlan, PlannedFault, read_plan, write_plan
from elastictrain.chaos.processes import StartedProcess, StuckError
from elastictrain.chaos.run import ChaosOutcome, ChaosRun
from elastictrain.chaos.run_events import generation_facts
from elastictrain.errors import EXIT_BUG, EXIT_USAGE, ConfigError

FULL_DISK = PlannedFault(ChaosKind.FULL_DISK, at_s=0.0, host="a", lasts_s=0.1)
REFUSAL = "elastictrain: another launcher of the run lives on this host (process 7)"


@dataclass
class Launcher:
    """It lives until somebody ends it, however often it is asked to."""

    code: int | None = None
    pid: int = 0

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        return 0 if self.code is None else self.code


@dataclass
class Host:
    name: str
    folder: Path
    address: str = "10.0.0.1"
    launchers: list[Launcher] = field(default_factory=list)
    refuses_after: int = 99  # launchers

    @property
    def memory(self) -> Path:
        return self.folder

    def popen(self, command: Sequence[str | Path], *, log: Path, extra_environment: Mapping[str, str] = {}) -> StartedProcess:
        log.parent.mkdir(exist_ok=True)
        refuses = len(self.launchers) >= self.refuses_after
        log.write_text(REFUSAL if refuses else "")
        self.launchers.append(Launcher(EXIT_USAGE if refuses else None))
        return StartedProcess(self.launchers[-1], log)

    def inhabitants(self) -> list[int]:
        return []

    def kill(self) -> None:
        for one in self.launchers:
            one.code = -signal.SIGKILL if one.code is None else one.code

    def lose(self) -> None:
        self.kill()

    def restore(self) -> None:
        pass


def fleet_of(folder: Path, host: Host) -> Injectors:
    events = folder / "run" / "events"
    events.mkdir(parents=True)
    (events / "1-r00000.jsonl").write_text(
        json.dumps({"event": "step", "time": 1.0, "step": 9, "incarnation": "1", "loss": 1.0}) + "\n"
    )
    hosts: dict[str, FleetHost] = {host.name: host}
    fleet = LauncherFleet(folder / "run", folder / "logs", [])
    return Injectors(fleet, hosts, {host.name: HostControl(folder / "control")}, folder, pause_s=0.0)


def soak(injectors: Injectors, *faults: PlannedFault, judged: bool = True) -> ChaosOutcome:
    """Faults come at their times: nobody trains here."""
    return ChaosRun(injectors, FaultPlan(1, ("a",), 1, faults), lambda _: None, strict=True, judged=judged).run()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host("a", tmp_path / "memory")


@pytest.fixture
def injectors(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Injectors:
    monkeypatch.setattr(injectors_module, "processes_on", lambda *_: ["a process"])
    monkeypatch.setattr(injectors_module, "send_signal", lambda *_: None)
    return fleet_of(tmp_path, host)


@pytest.mark.parametrize("told_s", [0.05, 30.0])
def test_a_host_that_is_asked_to_leave_is_off_before_another_comes(host: Host, injectors: Injectors, told_s: float) -> None:
    """Its launcher may still wait for the saver then."""
    soak(injectors, PlannedFault(ChaosKind.LEAVE, at_s=0.0, host="a", lasts_s=0.1, amount=told_s))
    assert [one.code for one in host.launchers] == [-signal.SIGKILL, None]


def test_a_host_has_one_launcher_whatever_faults_meet_on_it(host: Host, injectors: Injectors) -> None:
    lost = PlannedFault(ChaosKind.HOST_LOST, at_s=0.0, host="a", lasts_s=0.1)
    soak(injectors, lost, replace(lost, lasts_s=0.2), judged=False)
    assert [one.code for one in host.launchers] == [-signal.SIGKILL, None]


def test_a_launcher_that_takes_long_to_die_is_not_missed(
    host: Host, injectors: Injectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injectors_module, "LAUNCHER_BACK_S", 0.05)
    dies = Timer(0.3, host.kill)
    monkeypatch.setattr(injectors_module, "send_signal", lambda _, number: dies.start() if number == signal.SIGKILL else None)
    outcome = soak(injectors, PlannedFault(ChaosKind.KILL_LAUNCHER, at_s=0.0, host="a"), judged=False)
    dies.join()
    assert [one.code for one in host.launchers] == [-signal.SIGKILL, None]
    assert -signal.SIGKILL not in outcome.facts.exit_codes.values()


def test_a_launcher_that_is_refused_ends_the_soak_with_a_verdict_that_tells_why(host: Host, injectors: Injectors) -> None:
    fault = PlannedFault(ChaosKind.LEAVE, at_s=0.0, host="a", lasts_s=0.1)
    host.refuses_after = 1
    outcome = soak(injectors, fault)
    told = {one.invariant: one.what for one in outcome.violations}
    assert {Invariant.GOES_ON, Invariant.EXIT_CODES} <= told.keys()
    assert "another launcher of the run" in told[Invariant.GOES_ON]
    assert str(EXIT_USAGE) in told[Invariant.EXIT_CODES]
    assert [one.fault for one in outcome.struck] == [fault]


def test_launchers_that_are_refused_from_the_start_are_given_a_wrong_config(host: Host, injectors: Injectors) -> None:
    (injectors.fleet.run_dir / "events" / "1-r00000.jsonl").unlink()
    host.refuses_after = 0
    with pytest.raises(ConfigError, match="another launcher"):
        soak(injectors)


def test_a_fault_that_raises_ends_the_soak_with_a_verdict_that_names_it(injectors: Injectors) -> None:
    injectors.disk = injectors.folder / "none"
    outcome = soak(injectors, FULL_DISK)
    (only,) = outcome.violations
    assert only.invariant is Invariant.GOES_ON
    assert str(FULL_DISK) in only.what
    assert "FileNotFoundError" in only.what
    assert (outcome.struck, outcome.not_injected) == ([], FULL_DISK)


def test_a_run_that_cannot_be_judged_has_a_verdict(injectors: Injectors) -> None:
    with (injectors.fleet.run_dir / "events" / "1-r00000.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resume", "time": 2.0, "incarnation": "1"}) + "\n")
    (only,) = soak(injectors).violations
    assert only.invariant is Invariant.GOES_ON
    assert "KeyError: 'step'" in only.what


@dataclass(frozen=True, slots=True)
class Arena(ChaosArena):
    """Nothing happens in the undisturbed run that has not in the other one."""

    injectors: Injectors = field(kw_only=True)
    wrong: str = ""  # with the undisturbed run
    wrong_at_the_end: str = ""  # with what is undone then

    @contextmanager
    def opened(self, folder: Path, *, plain: bool = False) -> Iterator[Injectors]:
        if plain:
            raise StuckError("no rendezvous")
        yield self.injectors
        if self.wrong_at_the_end:
            raise OSError(self.wrong_at_the_end)

    def undisturbed(self, folder: Path, *, steps: int) -> Path:
        if self.wrong:
            raise StuckError(self.wrong)
        return self.injectors.fleet.run_dir


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(injectors: Injectors, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Carries out faults; returns the exit code and what is printed."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    plan = injectors.folder / "plan.json"

    def chaos_of(*faults: PlannedFault, options: Sequence[str] = (), **wrong: str) -> tuple[int, str]:
        monkeypatch.setattr(chaos, "ChaosArena", partial(Arena, injectors=injectors, **wrong))
        plan.write_text(write_plan(FaultPlan(1, ("a",), 1, faults, strict=True)))
        code = chaos.main(["--replay", str(plan), "--plan", str(plan), *options])
        return code, capsys.readouterr().out

    return chaos_of


def test_a_soak_without_anything_to_compare_with_has_a_verdict(command: Command) -> None:
    code, said = command(wrong="the undisturbed run ended with 70")
    assert code == EXIT_BUG
    assert "BROKEN same_losses: nothing to compare with: the undisturbed run ended with 70" in said


def test_what_cannot_be_undone_after_a_soak_is_part_of_its_verdict(command: Command) -> None:
    code, said = command(wrong_at_the_end="the disk is busy")
    assert code == EXIT_BUG
    assert "OSError: the disk is busy" in said


@pytest.mark.parametrize(
    ("options", "wrong_code"), [(("--html", "/proc/none/page.html"), EXIT_USAGE), (("--against", "torchrun"), EXIT_BUG)]
)
def test_a_verdict_is_printed_whatever_else_cannot_be(command: Command, options: Sequence[str], wrong_code: int) -> None:
    code, said = command(options=options)
    assert code == wrong_code
    assert "all held: 0 faults" in said
    code, said = command(wrong="the undisturbed run ended with 70", options=options)
    assert code == EXIT_BUG
    assert "BROKEN same_losses" in said


def test_a_fault_that_raises_is_in_the_shortest_plan(command: Command, injectors: Injectors) -> None:
    injectors.disk = injectors.folder / "none"
    later = PlannedFault(ChaosKind.LEAVE, at_s=1.0, host="a", lasts_s=0.1)
    code, said = command(FULL_DISK, later, options=("--shrink-minutes", "1e-9"))
    assert code == EXIT_BUG
    assert f"BROKEN goes_on: {FULL_DISK}: could not be injected" in said
    assert read_plan((injectors.folder / "plan.shortest.json").read_text()).faults == (FULL_DISK,)


def test_a_step_counts_as_replicated_when_all_ranks_have_sent_it_at_the_first_try() -> None:
    def sent(step: int, rank: int, *, event: str = "replicated", number: int = 1) -> dict[str, object]:
        return {"event": event, "incarnation": f"{number:06d}-aa", "step": step, "of_rank": rank}

    members = [{"host": "a-1", "processes": 2}, {"host": "b-1", "processes": 1}]
    records = [{"number": 1, "members": members}, {"number": 2, "members": members[:1]}]
    rows = [sent(step, rank) for step in (5, 9) for rank in range(3)]
    rows += [sent(12, 0), sent(12, 1), {"event": "checkpoint_saved", "incarnation": "000001-aa", "step": 12}]
    found = generation_facts(records, savers=rows, spoilt={2})
    assert found == [GenerationFact(1, {"a-1", "b-1"}, 9), GenerationFact(2, {"a-1"}, 0, spoilt=True)]
    failed = [*rows, sent(9, 2, event="replication_failed"), sent(7, 0, number=2), sent(7, 1, number=2)]
    assert [one.replicated for one in generation_facts(records, savers=failed)] == [5, 7]
