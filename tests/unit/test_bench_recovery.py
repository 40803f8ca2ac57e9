"""The figures of `scripts/bench_recovery.py`, from rows as runs write them."""

from typing import Any

import pytest

from scripts.recovery_report import (
    Outcome,
    Sample,
    Strike,
    boundary,
    differences,
    growth,
    growth_table,
    judge,
    ledger_differences,
    new_step,
    table,
    usual_step_s,
)

BATCH = 4
PIDS = {0: 10, 1: 11, 2: 12}
STRIKE = Strike(time=103.5, ranks=(1,), pids=PIDS)


def step(number: int, time: float, *, life: str = "000001-a", loss: float | None = None) -> dict[str, Any]:
    value = 1 / number if loss is None else loss
    positions = [(number - 1) * BATCH, number * BATCH]
    return {"event": "step", "time": time, "incarnation": life, "step": number, "loss": value, "positions": positions}


def event(name: str, time: float, *, life: str = "000002-b", **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "incarnation": life, **fields}


BEFORE = [event("start", 100.0, life="000001-a"), *(step(number, 100.0 + number) for number in (1, 2, 3))]
RESTARTED = [
    *BEFORE,
    # The life that is ending still tells a step.
    step(4, 103.6),
    event("start", 104.0),
    event("resume", 104.1),
    step(2, 105.0, life="000002-b"),
    step(3, 105.5, life="000002-b"),
    step(4, 106.0, life="000002-b"),
    step(5, 106.5, life="000002-b"),
]
RECOVERY = event(
    "recovery",
    104.2,
    rung="in_place",
    seconds={"detach": 0.1, "total": 0.7},
    steps_repeated=2,
    lost=["rank 1 on host"],
    reason="killed",
    pids={"0": 10, "1": 99, "2": 12},
    world_size=3,
)


def test_a_new_step_is_one_that_no_life_before_has_done() -> None:
    assert (found := new_step(RESTARTED, STRIKE.time)) is not None
    assert found["step"] == 5
    assert boundary(RESTARTED, STRIKE.time) == RESTARTED.index(RESTARTED[5])
    assert new_step(RESTARTED[:-1], STRIKE.time) is None
    assert new_step(BEFORE, STRIKE.time) is None


def test_one_name_for_all_lives_is_told_apart_by_a_repeated_step() -> None:
    rows = [*BEFORE, step(2, 104.0), step(3, 104.5), step(4, 105.0)]
    assert (found := new_step(rows, STRIKE.time)) is not None
    assert found["step"] == 4


def test_another_name_is_another_life_though_no_step_is_repeated() -> None:
    rows = [*BEFORE, step(4, 104.0, life="000002-b")]
    assert (found := new_step(rows, STRIKE.time)) is not None
    assert found["step"] == 4
    # Without the other name it is a step of the life that is ending.
    assert new_step([*BEFORE, step(4, 104.0)], STRIKE.time) is None


def test_without_an_event_the_pids_tell_the_rung() -> None:
    outcome = judge(STRIKE, RESTARTED, pids={0: 20, 1: 21, 2: 22})
    assert (outcome.rung, outcome.last_step, outcome.steps_repeated) == ("restart", 4, 3)
    assert (outcome.new_step_s, outcome.first_step_s) == (pytest.approx(3.0), pytest.approx(1.5))
    assert (outcome.survivors, outcome.survivors_kept) == (2, 0)
    assert judge(STRIKE, RESTARTED, pids={0: 10, 1: 21, 2: 12}).rung == "in_place"
    # One of two survivors is new.
    assert judge(STRIKE, RESTARTED, pids={0: 10, 1: 21, 2: 22}).rung == "restart"
    # Nobody survived.
    everyone = Strike(time=103.5, ranks=(0, 1, 2), pids=PIDS)
    assert judge(everyone, RESTARTED, pids=PIDS).rung == "restart"


def test_the_event_tells_rung_pids_phases_and_repeated_steps() -> None:
    rows = [*RESTARTED[:7], RECOVERY, *RESTARTED[7:]]
    outcome = judge(STRIKE, rows, pids={})
    assert (outcome.rung, outcome.steps_repeated, outcome.seconds) == ("in_place", 2, RECOVERY["seconds"])
    assert (outcome.survivors, outcome.survivors_kept) == (2, 2)
    assert outcome.new_step_s == pytest.approx(3.0)
    # A rank that another strike hit meanwhile is no survivor.
    assert judge(STRIKE, rows, pids={}, struck_too=[2]).survivors == 1


def test_a_recovery_that_ended_in_no_new_step_has_no_time() -> None:
    outcome = judge(STRIKE, BEFORE, pids={})
    assert (outcome.new_step_s, outcome.first_step_s, outcome.last_step) == (None, None, 3)
    assert table([outcome])[1].endswith("1 never")


def test_the_usual_step_is_the_median() -> None:
    undisturbed = [step(number, 200.0 + 0.5 * number) for number in range(1, 6)]
    assert usual_step_s(undisturbed) == pytest.approx(0.5)


def test_another_loss_other_positions_and_missing_steps_differ() -> None:
    right = [step(number, 200.0 + number) for number in range(1, 6)]
    assert differences(RESTARTED, right) == []
    (told,) = differences([*RESTARTED, step(2, 107.0, loss=0.5000001)], right)
    assert told.startswith("step 2: loss 0.5000001")
    (told,) = differences([*RESTARTED, step(2, 107.0) | {"positions": [4, 9]}], right)
    assert "[4, 9]" in told
    assert differences([row for row in RESTARTED if row.get("step") != 3], right) == ["step 3: missing"]
    assert len(differences(RESTARTED, right[:-1])) == 1


def test_the_ledger_must_have_each_position_once_and_the_same_samples() -> None:
    right = {1: {0: 7, 1: 3, 2: 5, 3: 1}, 2: {4: 2, 5: 0, 6: 4, 7: 6}}
    assert ledger_differences(right, right, steps=2, batch=BATCH) == []
    for wrong in ({2: right[2]}, {**right, 2: {4: 2, 5: 0, 6: 4}}, {**right, 2: {**right[2], 8: 0}}, {**right, 2: {4: 9}}):
        assert len(ledger_differences(wrong, right, steps=2, batch=BATCH)) == 1
        # Also where both have the same fault.
        assert len(ledger_differences(wrong, wrong, steps=2, batch=BATCH)) == 1
    assert len(ledger_differences({**right, 1: {**right[1], 0: 9}}, right, steps=2, batch=BATCH)) == 1


def test_growth_compares_the_first_third_with_the_last() -> None:
    samples = [[Sample("launcher", {"descriptors": 9.0 + number, "bytes": 1e6})] for number in range(9)]
    found = growth([*samples, [Sample("saver 1", {"threads": 3.0})]])
    assert found == {"launcher": {"descriptors": (10.0, 16.5), "bytes": (1e6, 1e6)}, "saver 1": {}}
    assert growth([]) == {}


def test_tables_are_no_wider_than_a_terminal() -> None:
    outcomes = [judge(STRIKE, RESTARTED, pids={}), judge(STRIKE, [*RESTARTED, RECOVERY], pids={})]
    slow = Outcome(
        strike=STRIKE,
        rung="regroup",
        last_step=3,
        new_step_s=12345.6,
        first_step_s=None,
        steps_repeated=100,
        survivors=2,
        survivors_kept=1,
        seconds={"a phase with a long name": 100.0},
    )
    big = growth([[Sample("host memory", {"bytes": 1.5e12, "threads": 1e4, "descriptors": 1e5})]] * 3)
    lines = [*table([*outcomes, slow]), *growth_table(big)]
    assert max(map(len, lines)) <= 80
