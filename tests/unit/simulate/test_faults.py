from itertools import islice
from pathlib import Path

import pytest

from elastictrain.errors import UsageError
from elastictrain.simulate.faults import FaultKind, FleetFault, Rates, read_trace, replay, seeded

MONTH_S = 30 * 86_400.0


def test_rates_are_those_of_each_kind_and_the_order_is_that_of_time() -> None:
    rates = Rates(worker_h=100.0, host_h=200.0, notice_h=400.0, network_h=0.0)
    faults = list(seeded(rates, machines=100, until_s=MONTH_S, seed=1))
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    counts = {kind: sum(fault.kind is kind for fault in faults) for kind in FaultKind}
    assert counts[FaultKind.NETWORK] == 0
    for kind, hours in ((FaultKind.WORKER, 100), (FaultKind.HOST, 200), (FaultKind.NOTICE, 400)):
        expected = 100 * 720 / hours
        assert abs(counts[kind] - expected) < 4 * expected**0.5
    assert list(seeded(rates, machines=100, until_s=MONTH_S, seed=1)) == faults
    assert list(seeded(rates, machines=100, until_s=MONTH_S, seed=2)) != faults


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("0,4\n30,4\n30,2\n\n90,4\n", [(0, 4), (30, 4), (30, 2), (90, 4)]),
        ('{"metadata": {"gap_seconds": 300}, "data": [4, 2]}', [(0, 4), (300, 2), (600, 2)]),
    ],
)
def test_two_formats_of_traces(tmp_path: Path, text: str, counts: list[tuple[float, int]]) -> None:
    (tmp_path / "trace").write_text(text)
    assert read_trace(tmp_path / "trace") == counts


@pytest.mark.parametrize(
    "text", ["", "0,0\n", "5,1\n0,1\n", "0,-1\n1,2\n", "0;4\n", "{}", '{"metadata": {"gap_seconds": 1}, "data": []}', '{"data"']
)
def test_other_traces_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UsageError, match="trace must have"):
        read_trace(tmp_path / "trace")
    with pytest.raises(UsageError, match="missing must have"):
        read_trace(tmp_path / "missing")


def test_hosts_go_and_come_as_in_the_trace_again_and_again() -> None:
    faults = replay([(0.0, 2), (30.0, 1), (60.0, 2), (99.0, 2)], machines=4, until_s=1000.0, seed=1)
    taken = list(islice(faults, 8))
    assert [(fault.at_s, fault.kind) for fault in taken] == [
        *[(30.0, FaultKind.HOST)] * 2,
        *[(60.0, FaultKind.COME)] * 2,
        *[(130.0, FaultKind.HOST)] * 2,
        *[(160.0, FaultKind.COME)] * 2,
    ]
    assert {fault.machines for fault in taken[:2]} == {fault.machines for fault in taken[2:4]}


@pytest.mark.parametrize(("noticed", "kind"), [(0.0, FaultKind.HOST), (1.0, FaultKind.NOTICE)])
def test_hosts_of_a_trace_may_be_told_before(noticed: float, kind: FaultKind) -> None:
    first: FleetFault = next(replay([(0.0, 2), (30.0, 1)], machines=2, until_s=50.0, seed=1, noticed=noticed))
    assert first.kind is kind
