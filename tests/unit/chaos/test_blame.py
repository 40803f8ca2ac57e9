"""Which failure of a report belongs to which fault, what is printed of both, and what is known beside the undisturbed run."""

from elastictrain.chaos.blame import Struck, followed_by
from elastictrain.chaos.injectors import left_out
from elastictrain.chaos.invariants import Blamed, ChaosFacts, Invariant, check
from elastictrain.chaos.output import ComparedRun, comparison, culprits_line, kinds_table
from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.chaos.undisturbed import farthest
from elastictrain.report.failures import FailureRecord


def fault(kind: ChaosKind, host: str = "a") -> PlannedFault:
    return PlannedFault(kind, at_s=1.0, host=host)


def failure(generation: int, culprit: str) -> FailureRecord:
    return FailureRecord(0.0, generation, culprit, "killed by SIGKILL", 137, (), None, 3, 1.0, "in_place")


KILL, SAVER, LAUNCHER = (fault(kind) for kind in (ChaosKind.KILL_WORKER, ChaosKind.KILL_SAVER, ChaosKind.KILL_LAUNCHER))


def test_a_failure_belongs_to_the_last_fault_of_its_generation() -> None:
    struck = [Struck(SAVER, 1, -1), Struck(KILL, 1, 2, 4.0), Struck(KILL, 2, 0, 5.0)]
    found, blamed = followed_by(
        struck, [failure(1, "rank 2 on vm"), failure(3, "rank 1 on vm")], lambda text: text.replace("vm", "a")
    )
    assert [(number, one.generation) for number, one in found.items()] == [(1, 1)]
    assert blamed == [Blamed(KILL, "rank 2 on a", 2), Blamed(KILL, None, 0)]


def test_a_worker_must_be_blamed_by_its_rank() -> None:
    for culprit, broken in (("rank 2 on a", []), ("rank 1 on a", [Invariant.RIGHT_CULPRIT]), (None, [Invariant.RIGHT_CULPRIT])):
        assert [one.invariant for one in check(ChaosFacts(blamed=[Blamed(KILL, culprit, 2)]))] == broken


def test_workers_of_the_only_host_save_when_they_lose_their_launcher() -> None:
    struck = [Struck(LAUNCHER, 1, -1)]
    assert followed_by(struck, [], str, alone=True)[1] == []
    assert followed_by(struck, [], str)[1] == [Blamed(LAUNCHER, None)]


def test_tables_are_at_most_80_columns_wide() -> None:
    struck = [Struck(KILL, 1, 0, 123.4), Struck(KILL, 2, 1, 2.0), Struck(SAVER, 2, -1, 0.5)]
    failures = {0: failure(1, "rank 0 on a"), 1: failure(2, "rank 1 on a")}
    lines = [*kinds_table(struck, failures), culprits_line(struck, failures, wrong=1)]
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[:7] == ["kill_saver", "1", "0.5", "0.5", "-", "-", "0"]
    assert lines[3].split()[:7] == ["kill_worker", "2", "62.7", "123.4", "3", "3", "2"]
    assert lines[-1].startswith("1 of 2 ")


def test_runs_are_compared_over_the_same_time_and_paid_for_what_is_there() -> None:
    ours, plain = (ComparedRun(name, useful, 100.0, 80.0, 1000, 5) for name, useful in (("ours", 60.0), ("torchrun", 30.0)))
    rows = {line[:22].strip(): line[22:].split() for line in comparison([ours, plain], price=36.0)}
    assert rows["goodput, all workers"] == ["60.0%", "30.0%"]
    assert rows["goodput, those there"] == ["75.0%", "37.5%"]
    assert rows["cost"] == ["0.8000", "0.8000"]
    assert max(map(len, comparison([ours, plain], price=36.0))) <= 80


def test_of_a_repeated_step_the_loss_counts_that_is_farthest_off() -> None:
    rows = [(1, 1, 2.0), (2, 1, 2.5), (1, 2, None), (2, 2, 1.0)]
    told = [{"incarnation": f"{number:06d}-a", "step": step, "loss": loss} for number, step, loss in rows]
    found = farthest(told, {1: 2.0, 2: 1.0})
    assert found[1] == 2.5
    assert found[2] != found[2]
    assert farthest(told, {1: 2.0, 2: 1.0}, spoilt=[1])[2] == 1.0


def test_what_cannot_be_had_is_left_out_with_the_reason() -> None:
    assert set(left_out([ChaosKind.CABLE, ChaosKind.HANG], hosts=1, workers=3, alone="no root")) == {ChaosKind.CABLE}
    assert set(left_out([ChaosKind.FLIP_GRADIENT], hosts=1, workers=2, alone="no root")) == {ChaosKind.FLIP_GRADIENT}
    assert left_out([ChaosKind.FLIP_GRADIENT, ChaosKind.CABLE], hosts=3, workers=1, alone="") == {}
