from dataclasses import replace

import pytest

from elastictrain.preflight.group.collectives import Collective, WrongResult
from elastictrain.preflight.group.judge import (
    STRAGGLER_RATIO_CPU,
    agreed,
    judge_bandwidth,
    judge_pairs,
    judge_rates,
    judge_results,
    stragglers,
)
from elastictrain.preflight.group.measurements import BandwidthPoint, PairBandwidth
from elastictrain.preflight.policy import decide
from elastictrain.preflight.verdict import Scope, Status, Verdict
from tests.unit.preflight.group.ranks import H200, members
from tests.unit.preflight.made import gpu_pair, rank, verdict

THREE = members("h1", "h2", "h3")
GB = 1 << 30


def results(faults: dict[int, list[WrongResult]]) -> list[Verdict]:
    return judge_results(Collective.ALL_GATHER, faults, THREE)


def subjects(verdicts: list[Verdict], status: Status) -> list[str]:
    return [verdict.subject for verdict in verdicts if verdict.status is status]


def test_right_results_pass() -> None:
    assert subjects(results({0: [], 1: [], 2: []}), Status.PASS) == ["all"]


def test_the_one_rank_that_all_got_wrong_values_from_is_named() -> None:
    found = results({0: [WrongResult("bad", 2)], 1: [WrongResult("bad", 2), WrongResult("worse", 2)], 2: []})
    assert subjects(found, Status.FAIL) == [rank(2, "h3")]
    assert found[0].scope is Scope.HOST
    assert "on h3" in found[0].remedy


def test_else_those_that_got_something_wrong() -> None:
    assert subjects(results({0: [], 1: [WrongResult("bad", 2)], 2: []}), Status.FAIL) == [rank(1, "h2")]
    assert subjects(results({0: [], 1: [WrongResult("bad", 2), WrongResult("bad", 0)], 2: []}), Status.FAIL) == [rank(1, "h2")]
    found = results({0: [WrongResult("bad", None)], 1: [], 2: [WrongResult("bad", None)]})
    assert subjects(found, Status.FAIL) == [rank(0, "h1"), rank(2, "h3")]
    assert {one.scope for one in found} == {Scope.GROUP}


def test_several_ranks_of_one_host_are_the_hosts_fault() -> None:
    found = judge_results(
        Collective.ALL_REDUCE,
        {1: [WrongResult("bad", None)], 2: [WrongResult("bad", 0)]},
        members("h1", "h2", "h2"),
    )
    assert [(one.subject, one.scope) for one in found] == [(rank(1, "h2"), Scope.HOST), (rank(2, "h2"), Scope.HOST)]


def test_a_sum_that_is_wrong_everywhere_is_the_groups() -> None:
    [found] = results({rank: [WrongResult("bad", None)] for rank in range(3)})
    assert (found.subject, found.status, found.scope) == ("all", Status.FAIL, Scope.GROUP)


def bandwidth(seconds: float, *, device: str = H200, nccl: bool = True, num_bytes: int = GB) -> Verdict:
    group = members("h1", "h1", device=device)
    return judge_bandwidth(BandwidthPoint(num_bytes, seconds, 2), group, nccl=nccl, least_ratio=0.7)


def test_bus_bandwidth_against_the_link() -> None:
    good = bandwidth(0.00325)
    assert (good.status, good.measured, good.expected, good.unit.split()[0]) == (Status.PASS, 330.4, 370.8, "GB/s")
    bad = bandwidth(0.005)
    assert (bad.status, bad.scope, bad.subject, bad.expected) == (Status.FAIL, Scope.HOST, "h1", 370.8)
    assert "NVLinks of" in bad.remedy


def test_of_several_hosts_none_is_to_blame_for_bus_bandwidth() -> None:
    group = tuple(replace(one, network_gbps=400.0) for one in members("h1", "h2", device=H200))
    bad = judge_bandwidth(BandwidthPoint(GB, 0.1, 2), group, nccl=True, least_ratio=0.7)
    assert (bad.status, bad.scope, bad.subject, bad.expected) == (Status.FAIL, Scope.GROUP, "all", 48)


def test_what_every_collective_takes_is_not_held_against_a_small_message() -> None:
    """Figures of 64 MB between two healthy H200, of which 253.8 GB/s are less than 0.7 of what the links can do."""
    usual_s, slower_s = 0.0002486, 0.0002644
    assert bandwidth(slower_s, num_bytes=64 << 20).status is Status.PASS
    # Half of the links.
    assert bandwidth(2 * usual_s, num_bytes=64 << 20).status is Status.FAIL


def test_an_unknown_link_and_gloo_are_only_measured() -> None:
    for found in (bandwidth(9.0, device="something new"), bandwidth(9.0, nccl=False)):
        assert (found.status, found.measured, found.expected) == (Status.PASS, 0.1193, None)


def test_stragglers() -> None:
    assert stragglers({0: 100.0, 1: 86.0, 2: 100.0}, ratio=0.85) == {}
    assert stragglers({0: 100.0, 1: 84.0, 2: 100.0}, ratio=0.85) == {1: 0.84}
    assert stragglers({0: 100.0, 1: 70.0}, ratio=0.85) == {1: pytest.approx(70 / 85)}


@pytest.mark.parametrize(("device", "status"), [("cpu", Status.WARN), (H200, Status.FAIL)])
def test_slow_twice_is_a_straggler(device: str, status: Status) -> None:
    group = members("h1", "h2", "h3", device=device)
    first = {0: 700.0, 1: 400.0, 2: 710.0}
    again = judge_rates(first, {0: 700.0, 1: 420.0, 2: 700.0}, group, ratio=0.7)
    assert [(one.subject, one.status, one.measured, one.expected) for one in again] == [(rank(1, "h2"), status, 420, 700)]
    assert again[0].scope is Scope.HOST
    assert "h2" in again[0].remedy


def test_stragglers_on_several_hosts_are_the_groups() -> None:
    group = members("h1", "h2", "h3", "h4", "h5", device=H200)
    rates = {0: 700.0, 1: 400.0, 2: 400.0, 3: 700.0, 4: 700.0}
    found = judge_rates(rates, rates, group, ratio=0.85)
    assert [(one.subject, one.scope) for one in found] == [(rank(1, "h2"), Scope.GROUP), (rank(2, "h3"), Scope.GROUP)]


def test_mixed_gpus_and_busy_processors_are_not_failures() -> None:
    first = {0: 700.0, 1: 510.0, 2: 710.0}
    mixed = (*members("h1", "h2", device=H200), replace(THREE[2], device="NVIDIA L40S"))
    assert subjects(judge_rates(first, first, mixed, ratio=0.85), Status.WARN) == [rank(1, "h2")]
    assert subjects(judge_rates(first, first, THREE, ratio=STRAGGLER_RATIO_CPU), Status.PASS) == ["all"]


def test_slow_once_is_not() -> None:
    first = {0: 700.0, 1: 500.0, 2: 710.0}
    found = judge_rates(first, {0: 700.0, 1: 690.0, 2: 700.0}, THREE, ratio=0.85)
    assert subjects(found, Status.PASS) == ["all"]
    assert subjects(judge_rates({0: 1.0}, None, members("h1"), ratio=0.85), Status.PASS) == ["all"]


def pairs(*, slow: float = 370.0, access: bool | None = True) -> list[Verdict]:
    reached = {
        0: [PairBandwidth(1, 370.0, True), PairBandwidth(2, 365.0, True)],
        1: [PairBandwidth(0, 371.0, True), PairBandwidth(2, slow, access)],
        2: [PairBandwidth(0, 370.0, None), PairBandwidth(1, 370.0, True)],
    }
    return judge_pairs(reached, members("h1", "h1", "h1", device=H200), least_ratio=0.7)


def test_pairs_of_gpus() -> None:
    assert subjects(pairs(), Status.PASS) == ["h1"]
    [slow] = pairs(slow=250.0)
    assert (slow.subject, slow.status, slow.scope, slow.expected) == (gpu_pair(2, 1), Status.FAIL, Scope.HOST, 370.8)
    assert subjects(pairs(slow=260.0), Status.FAIL) == []
    [blind] = pairs(access=False)
    assert (blind.status, str(blind.measured).split(",")[0]) == (Status.FAIL, "370")
    assert "topo -p2p" in blind.remedy


@pytest.mark.parametrize(("device", "usual"), [(H200, 123.0), ("NVIDIA L40S", 20.0)])
def test_pairs_that_share_their_links_are_compared_with_each_other(device: str, usual: float) -> None:
    """Four GPUs without an NVSwitch have a third of their NVLinks for each pair; PCIe depends on the sockets between."""
    for slow, status in ((0.6 * usual, Status.PASS), (0.4 * usual, Status.FAIL)):
        reached = {rank: [PairBandwidth(other, usual, True) for other in range(4) if other != rank] for rank in range(4)}
        reached[2][1] = PairBandwidth(1, slow, True)
        found = judge_pairs(reached, members("h1", "h1", "h1", "h1", device=device), least_ratio=0.7)
        assert [(one.status, one.expected) for one in found] == [(status, usual)]


def test_hosts_are_judged_apart_and_single_gpus_skipped() -> None:
    reached = {
        0: [PairBandwidth(1, 300.0, True)],
        1: [PairBandwidth(0, 300.0, True)],
        2: [PairBandwidth(3, 20.0, True)],
        3: [PairBandwidth(2, 20.0, True)],
    }
    found = judge_pairs(reached, members("h1", "h1", "h2", "h2", device=H200), least_ratio=0.7)
    assert subjects(found, Status.PASS) == ["h1", "h2"]
    alone = judge_pairs({0: [], 1: []}, members("h1", "h2", device=H200), least_ratio=0.7)
    assert subjects(alone, Status.SKIP) == ["all"]


def test_parts_of_a_check_that_blame_one_host() -> None:
    found = [
        verdict("fail", check="collectives", subject="all", scope="group"),
        verdict("fail", check="collectives", subject=rank(2, "h2")),
        verdict("fail", check="collectives", subject=rank(3, "h2")),
    ]
    assert agreed(found) == found
    assert [decide(found, host=host, hosts=["h1", "h2"]).exit_code for host in ("h1", "h2")] == [71, 69]


def test_parts_of_a_check_that_blame_several_hosts() -> None:
    first = verdict("fail", check="collectives", subject=rank(0, "h1"))
    second = verdict("fail", check="collectives", subject=rank(3, "h2"))
    slow, other = (
        verdict("warn", check="matmul", subject=rank(0, "h1")),
        verdict("fail", check="matmul", subject=rank(2, "h2")),
    )
    found = agreed([first, slow, second, other])
    assert [one.scope for one in found] == [Scope.GROUP, Scope.HOST, Scope.GROUP, Scope.HOST]
    # Devices that are slow by their own figures are, however many hosts have one.
    alike = [verdict("fail", check="p2p", subject=host) for host in ("h1", "h2")]
    assert agreed(alike) == alike
    # Not 78, as if every host failed by itself.
    assert decide(agreed([first, second]), host="h1", hosts=["h1", "h2"]).exit_code == 71
