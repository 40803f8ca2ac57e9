import pytest

from elastictrain.chaos.plan import TRAITS, ChaosKind, FaultPlan, PlannedFault, seeded_plan
from elastictrain.chaos.shrink import shrink

PLAN = seeded_plan(1, hosts=3, workers=2, count=100)


def kinds(plan: FaultPlan) -> list[ChaosKind]:
    return [fault.kind for fault in plan.faults]


@pytest.mark.parametrize("places", [(0,), (99,), (50,), (3, 40, 97), (10, 11), tuple(range(0, 100, 20))])
def test_what_is_left_is_what_fails(places: tuple[int, ...]) -> None:
    needed = [PLAN.faults[place] for place in places]

    def fails(plan: FaultPlan) -> bool:
        times = [fault.at_s and round(fault.at_s) for fault in plan.faults]
        return all(one.at_s and round(one.at_s) in times for one in needed)

    found = shrink(PLAN, fails)
    assert kinds(found.plan) == [fault.kind for fault in needed]
    assert found.minimal
    assert fails(found.plan)


def test_single_faults_become_plainer() -> None:
    fault = PlannedFault(ChaosKind.SLOW_DISK, at_s=12.4, host="c", lasts_s=14.0, amount=0.9)
    plan = PLAN.of(fault)
    plain = shrink(plan, lambda one: bool(one.faults)).plan.faults[0]
    traits = TRAITS[ChaosKind.SLOW_DISK]
    assert plain == PlannedFault(ChaosKind.SLOW_DISK, at_s=12.0, host="a", lasts_s=traits.lasts_s[0], amount=traits.amount[0])
    kept = shrink(plan, lambda one: any(fault.lasts_s > 10 and fault.host == "c" for fault in one.faults)).plan.faults[0]
    assert kept == PlannedFault(ChaosKind.SLOW_DISK, at_s=12.0, host="c", lasts_s=14.0, amount=traits.amount[0])


def test_tries_are_bounded_and_no_plan_runs_twice() -> None:
    ran = []

    def fails(plan: FaultPlan) -> bool:
        ran.append(plan)
        return len(plan.faults) > 60

    found = shrink(PLAN, fails, tries=25)
    assert found.tries == len(ran) == 25
    assert not found.minimal
    assert len(found.plan.faults) > 60
    assert len(set(ran)) == len(ran)
