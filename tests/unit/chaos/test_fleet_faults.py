from math import inf

import pytest

from elastictrain.chaos.blame import Struck
from elastictrain.chaos.fleet_faults import fault_history, fleet_faults
from elastictrain.chaos.invariants import ENDS_GENERATION
from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.simulate.faults import FaultHistory, FaultKind, FleetFault

HOSTS = ("a", "b", "c")


def of(kind: ChaosKind, *, host: str = "b", lasts_s: float = 5.0, amount: float = 0.0) -> list[FleetFault]:
    return [*fleet_faults(PlannedFault(kind, at_s=1.0, host=host, lasts_s=lasts_s, amount=amount), at_s=40.0, hosts=HOSTS)]


def test_the_times_of_a_history_are_those_at_which_faults_struck() -> None:
    leave = PlannedFault(ChaosKind.LEAVE, at_s=1.0, host="a", lasts_s=9.0, amount=20.0)
    kill = PlannedFault(ChaosKind.KILL_WORKER, at_s=2.0, host="c")
    slow = PlannedFault(ChaosKind.STORE_SLOW, at_s=3.0, lasts_s=4.0, amount=1.0)
    struck = [Struck(one, 1, -1, 5.0, time_s) for one, time_s in ((leave, 1010.0), (kill, 1012.0), (slow, 1015.0))]
    assert fault_history(struck, {}, hosts=HOSTS, begin_s=1000.0, end_s=1100.0) == FaultHistory(
        3,
        100.0,
        (
            FleetFault(10.0, FaultKind.NOTICE, (0,), inf),
            FleetFault(12.0, FaultKind.WORKER, (2,), 0.0),
            FleetFault(15.0, FaultKind.SAVES, (), 4.0),
            FleetFault(19.0, FaultKind.HOST, (0,), inf),
            FleetFault(19.0, FaultKind.COME, (0,), inf),
        ),
    )


@pytest.mark.parametrize(
    ("found", "machines"),
    [
        (of(ChaosKind.ONE_WAY), [(0, 2)]),
        (of(ChaosKind.PARTITION, host="c", amount=2.0), [(2, 0)]),
        (of(ChaosKind.BLIP, host=""), [(1,), (2,)]),
        (of(ChaosKind.FLIP_SHARD), [(), (0, 1, 2)]),
        (of(ChaosKind.FREEZE), [(1,), (1,)]),
        (of(ChaosKind.CLOCK), []),
    ],
)
def test_who_is_struck(found: list[FleetFault], machines: list[tuple[int, ...]]) -> None:
    assert [one.machines for one in found] == machines
    assert {one.lasts_s for one in found} <= {5.0}


@pytest.mark.parametrize("kind", sorted(ENDS_GENERATION))
def test_what_ends_a_generation_is_in_the_history(kind: ChaosKind) -> None:
    assert of(kind)
