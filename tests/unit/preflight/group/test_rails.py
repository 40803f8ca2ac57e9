import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from elastictrain.preflight.group.judge import RailFindings, judge_rails, needs_more
from elastictrain.preflight.group.measurements import PairBandwidth
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.host.counters import sent_bytes
from elastictrain.preflight.links.rounds import first_rounds
from elastictrain.preflight.verdict import Scope, Status
from tests.unit.preflight.conftest import HostMaker
from tests.unit.preflight.group.ranks import H200, members

RATIO = 0.5
Rate = Callable[[int, int], float]


def group(num_hosts: int, gpus: int) -> tuple[GroupMember, ...]:
    return members(*(f"h{rank // gpus}" for rank in range(num_hosts * gpus)), device=H200, network_gbps=400.0 * gpus)


def measured(ranks: tuple[GroupMember, ...], rate: Rate) -> Mapping[int, RailFindings]:
    """A fleet whose transfers have a rate that depends on source and target."""
    pairs: dict[int, list[PairBandwidth]] = {member.rank: [] for member in ranks}
    for local_rank in {member.local_rank for member in ranks}:
        rail = [member.rank for member in ranks if member.local_rank == local_rank]
        for pairing in first_rounds(len(rail), seed=0):
            for low, high in pairing:
                for source, target in ((rail[low], rail[high]), (rail[high], rail[low])):
                    pairs[target].append(PairBandwidth(source, rate(source, target), None))
    return {rank: RailFindings(tuple(some), 1 << 30) for rank, some in pairs.items()}


def noisy(seed: int, *, slow: Mapping[int, float]) -> Rate:
    """45 GB/s, up to a fifth less by chance, and one in fifty transfers much less; `slow` ranks by their share of it."""
    chance = random.Random(seed)

    def rate(source: int, target: int) -> float:
        usual = 45.0 * chance.uniform(0.8, 1.0) * (0.4 if chance.random() < 0.02 else 1.0)
        return usual * min(slow.get(source, 1.0), slow.get(target, 1.0))

    return rate


def judged(ranks: tuple[GroupMember, ...], seed: int, slow: Mapping[int, float]) -> list[tuple[str, Status]]:
    rate, parts = noisy(seed, slow=slow), list[Mapping[int, RailFindings]]()
    while needs_more(parts, ranks, ratio=RATIO):
        parts.append(measured(ranks, rate))
    return [(one.subject, one.status) for one in judge_rails(parts, ranks, ratio=RATIO)]


@pytest.mark.parametrize("seed", range(6))
def test_one_slow_rail_of_256_is_named_and_no_other(seed: int) -> None:
    ranks = group(32, 8)
    bad = random.Random(100 + seed).randrange(256)
    assert judged(ranks, seed, {bad: 0.3}) == [(f"rail {bad % 8} on h{bad // 8}", Status.FAIL)]


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_fleet_passes(seed: int) -> None:
    assert judged(group(32, 8), seed, {}) == [("all", Status.PASS)]
    assert judged(group(3, 8), seed, {}) == [("all", Status.PASS)]


@pytest.mark.parametrize("num_hosts", [3, 4, 5])
def test_in_small_groups_too(num_hosts: int) -> None:
    assert judged(group(num_hosts, 8), 0, {11: 0.2}) == [("rail 3 on h1", Status.FAIL)]


def test_between_two_hosts_the_link_is_named() -> None:
    ranks = group(2, 8)
    found = judge_rails([measured(ranks, lambda source, _: 9.0 if source == 3 else 45.0)], ranks, ratio=RATIO)
    assert [(one.subject, one.scope, one.measured) for one in found] == [("rail 3 on h0 -> rail 3 on h1", Scope.LINK, 9.0)]
    assert [one.status for one in judge_rails([measured(ranks, lambda *_: 45.0)], ranks, ratio=RATIO)] == [Status.PASS]


def test_a_port_with_a_lower_rate_than_on_other_hosts() -> None:
    ranks = tuple(replace(one, network_gbps=200.0) if one.host == "h1" else one for one in group(3, 2))
    found = judge_rails([measured(ranks, lambda *_: 45.0)], ranks, ratio=RATIO)
    assert [(one.subject, one.status, one.measured, one.expected) for one in found] == [("h1", Status.WARN, 200.0, 800.0)]


@pytest.mark.parametrize(
    ("planned", "grown", "statuses"),
    [
        ("rdma", 1 << 30, [Status.PASS]),
        ("rdma", 1 << 20, [Status.WARN]),
        ("rdma", None, [Status.PASS]),
        ("socket", 1 << 20, [Status.PASS]),
    ],
)
def test_counters_confirm_rdma(planned: str, grown: int | None, statuses: list[Status]) -> None:
    ranks = members("h0", "h1", "h2", device=H200, planned=planned)
    figures = dict(measured(ranks, lambda *_: 45.0))
    figures[1] = replace(figures[1], port_bytes=grown)
    found = judge_rails([figures], ranks, ratio=RATIO)
    assert [one.status for one in found] == statuses
    assert found[0].subject == ("h1" if Status.WARN in statuses else "all")


def test_nobody_to_compare_with() -> None:
    ranks = members("h0", "h1", device=H200)
    (found,) = judge_rails([{0: RailFindings((), 0), 1: RailFindings((), 0)}], ranks, ratio=RATIO)
    assert found.status is Status.SKIP


def test_counters_of_all_ports_are_added(make_host: HostMaker) -> None:
    ports = "/sys/class/infiniband/{}/ports/1/counters/port_xmit_data"
    assert sent_bytes(make_host({})) is None
    assert (
        sent_bytes(make_host({ports.format("mlx5_0"): "250", ports.format("mlx5_1"): "1000", ports.format("efa_0"): ""}))
        == 5000
    )
