from itertools import pairwise

import pytest

from elastictrain.chaos.plan import (
    TRAITS,
    ChaosKind,
    FaultPlan,
    FaultScope,
    PlannedFault,
    plan_of_trace,
    read_plan,
    seeded_plan,
    write_plan,
)
from elastictrain.errors import UsageError


def test_a_seed_makes_one_plan_and_every_kind_comes_before_any_comes_again() -> None:
    plan = seeded_plan(3, hosts=3, workers=2, count=3 * len(ChaosKind))
    assert plan == seeded_plan(3, hosts=3, workers=2, count=3 * len(ChaosKind)) != seeded_plan(4, hosts=3, workers=2, count=66)
    for begin in range(0, len(plan.faults), len(ChaosKind)):
        assert {fault.kind for fault in plan.faults[begin : begin + len(ChaosKind)]} == set(ChaosKind)
    times = [0.0, *(fault.at_s or 0.0 for fault in plan.faults)]
    assert all(20 <= later - earlier <= 60 for earlier, later in pairwise(times))


@pytest.mark.parametrize("kind", ChaosKind)
def test_figures_are_within_the_traits_of_their_kind(kind: ChaosKind) -> None:
    traits = TRAITS[kind]
    for fault in seeded_plan(1, hosts=3, workers=2, count=50, kinds=[kind]).faults:
        assert (fault.host == "") == (traits.scope is FaultScope.RUN)
        assert fault.worker in ((0, 1) if traits.scope is FaultScope.WORKER else (0,))
        assert traits.lasts_s[0] <= fault.lasts_s <= traits.lasts_s[1]
        assert traits.amount[0] <= fault.amount <= traits.amount[1]


def test_a_plan_ends_with_its_time() -> None:
    plan = seeded_plan(1, hosts=1, workers=1, until_s=100.0, every_s=(10.0, 10.0))
    assert [fault.at_s for fault in plan.faults] == [10.0 * number for number in range(1, 11)]


@pytest.mark.parametrize(
    "wrong", [{"hosts": 0}, {"workers": 0}, {"kinds": ()}, {"every_s": (2.0, 1.0)}, {"every_s": (-1.0, 1.0)}, {"count": 0}]
)
def test_what_makes_no_plan_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        seeded_plan(1, **{"hosts": 2, "workers": 1, "count": 5, **wrong})  # type: ignore[arg-type]


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = seeded_plan(1, hosts=30, workers=2, count=50)
    plan = plan.of(*plan.faults, PlannedFault(ChaosKind.HANG, step=7, host="h0003", worker=1))
    assert read_plan(write_plan(plan)) == plan
    assert read_plan(write_plan(plan.of())) == plan.of()


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ('{"kind": "hang", "host": "a"}', "neither"),
        ('{"kind": "hang", "host": "a", "at_s": 1, "step": 2}', "both"),
        ('{"kind": "hang", "host": "c", "at_s": 1}', "'c'"),
        ('{"kind": "hang", "host": "a", "at_s": 1, "worker": 2}', "worker"),
        ('{"kind": "hang", "host": "a", "at_s": -1}', "< 0"),
        ('{"kind": "store_away", "host": "a", "at_s": 1}', "whole run"),
        ('{"kind": "flood", "host": "a", "at_s": 1}', "flood"),
    ],
)
def test_a_wrong_fault_is_named(fault: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        read_plan('{"seed": 1, "hosts": ["a", "b"], "workers": 2, "faults": [' + fault + "]}", name="plan.json")
    assert "plan.json" in str(caught.value)
    assert "faults[0]" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", '{"seed": 1, "hosts": ["a", "a"], "workers": 1, "faults": []}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="plan"):
        read_plan(text)


def test_hosts_of_a_trace_go_and_come_back() -> None:
    counts = [(0.0, 4), (100.0, 2), (300.0, 4), (400.0, 3), (1000.0, 3)]
    plan = plan_of_trace(counts, hosts=4, workers=1, until_s=100.0, faster=10.0, seed=2)
    assert [(fault.at_s, fault.lasts_s) for fault in plan.faults] == [(10.0, 20.0), (10.0, 20.0), (40.0, 60.0)]
    assert {fault.kind for fault in plan.faults} == {ChaosKind.HOST_LOST}
    assert len({fault.host for fault in plan.faults[:2]}) == 2
    told = plan_of_trace(counts, hosts=4, workers=1, until_s=100.0, faster=10.0, noticed=1.0, notice_s=12.0)
    assert {(fault.kind, fault.amount) for fault in told.faults} == {(ChaosKind.LEAVE, 12.0)}


def test_a_fault_reads_as_a_sentence() -> None:
    assert str(PlannedFault(ChaosKind.HANG, step=7, host="b", worker=1)) == "after step 7: hang on b, worker 1"
    away = PlannedFault(ChaosKind.STORE_SLOW, at_s=2.5, lasts_s=3.0, amount=0.5)
    assert str(away) == "at 2.5 s: store_slow, for 3 s, 0.5"
    assert FaultPlan(1, ("a",), 1, (away,)).of().faults == ()
