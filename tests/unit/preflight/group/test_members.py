import pytest

from elastictrain.preflight.group.members import group_limit, introduced, local_limit, strangers
from tests.unit.preflight.group.ranks import H200, members


@pytest.mark.parametrize(
    ("gpu", "gbs", "link"),
    [
        ("NVIDIA H200", 370.8, "18 NVLinks of H200"),
        ("NVIDIA H100 80GB HBM3", 370.8, "18 NVLinks of H100"),
        ("NVIDIA H100 PCIe", 48.0, "PCIe of H100 PCIe"),
        ("NVIDIA H100 NVL", 48.0, "PCIe of H100 NVL"),
        ("NVIDIA H200 NVL", 48.0, "PCIe of H200 NVL"),
        ("NVIDIA H20", 370.8, "18 NVLinks of H20"),
        ("NVIDIA H800", 164.8, "8 NVLinks of H800"),
        ("NVIDIA B200", 721.8, "18 NVLinks of B200"),
        ("NVIDIA GB200", 721.8, "18 NVLinks of GB200"),
        ("NVIDIA A100-SXM4-80GB", 240.0, "12 NVLinks of A100-SXM"),
        ("NVIDIA A100 80GB PCIe", 24.0, "PCIe of A100"),
        ("Tesla V100-SXM2-32GB", 120.0, "6 NVLinks of V100-SXM"),
        ("NVIDIA L40S", 24.0, "PCIe of L40S"),
        ("NVIDIA GeForce RTX 4090", 24.0, "PCIe of RTX 4090"),
        ("Tesla T4", 12.0, "PCIe of T4"),
    ],
)
def test_gpus_by_name(gpu: str, gbs: float, link: str) -> None:
    limit = local_limit(gpu)
    assert limit is not None
    assert (limit.bus_gbs, limit.link) == (pytest.approx(gbs), link)


@pytest.mark.parametrize("gpu", ["cpu", "", "AMD Instinct MI300X", "something new"])
def test_unknown_gpus_are_unknown(gpu: str) -> None:
    assert local_limit(gpu) is None


def test_what_was_measured_between_two_h200_is_well_above_the_threshold() -> None:
    limit = group_limit(members("h1", "h1", device=H200))
    assert limit is not None
    assert 1.2 * 0.7 * limit.bus_gbs < 330
    assert limit.bus_gbs >= 330


def test_the_network_of_several_hosts() -> None:
    first = members(*["h1"] * 8, device="NVIDIA H100 80GB HBM3", network_gbps=3200.0)
    second = members(*["h2"] * 8, device="NVIDIA H100 80GB HBM3", network_gbps=400.0)
    limit = group_limit([*first, *second])
    assert limit is not None
    assert (limit.bus_gbs, limit.link) == (pytest.approx(48.0), "400 Gb/s of network")
    fast = group_limit([*first, *members(*["h2"] * 8, device="NVIDIA H100 80GB HBM3", network_gbps=3200.0)])
    assert fast is not None
    assert fast.bus_gbs == pytest.approx(370.8)


def test_one_rank_on_each_host_uses_no_link_between_gpus() -> None:
    limit = group_limit(members("h1", "h2", device="something new", network_gbps=100.0))
    assert limit is not None
    assert limit.bus_gbs == pytest.approx(12.0)


def test_one_unknown_link_leaves_the_limit_unknown() -> None:
    known, unknown = members("h1", device=H200, network_gbps=400.0), members("h2", device=H200)
    assert group_limit([*known, *unknown]) is None
    assert group_limit([*members("h1", device=H200), *members("h1", device="something new")]) is None
    assert group_limit(members("h1")) is None


def test_introductions() -> None:
    before = strangers(["h1", "h1", "h2"])
    assert [(one.local_rank, one.pid) for one in before] == [(0, None), (1, None), (0, None)]
    row = {"rank": 2, "host": "h2", "local_rank": 0, "pid": 5, "device": "x", "new": 1}
    after = introduced(before, {2: row, 1: None, 0: "?"})
    assert after[:2] == before[:2]
    assert (after[2].pid, after[2].device) == (5, "x")
