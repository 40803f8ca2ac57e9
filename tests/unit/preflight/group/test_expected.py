import pytest

from elastictrain.preflight.group.expected import Links, find_model, group_limit, local_limit, network_limit


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
    limit = local_limit(Links(gpu, None))
    assert limit is not None
    assert (limit.bus_gbs, limit.link) == (pytest.approx(gbs), link)


@pytest.mark.parametrize("gpu", [None, "", "AMD Instinct MI300X", "something new"])
def test_unknown_gpus_are_unknown(gpu: str | None) -> None:
    assert find_model(gpu) is None
    assert local_limit(Links(gpu, None)) is None


def test_what_was_measured_between_two_h200_is_well_above_the_threshold() -> None:
    limit = group_limit([Links("NVIDIA H200", None)] * 2, num_hosts=1, num_ranks=2)
    assert limit is not None
    assert 1.2 * 0.7 * limit.bus_gbs < 330
    assert limit.bus_gbs >= 330


def test_the_network_of_several_hosts() -> None:
    links = [Links("NVIDIA H100 80GB HBM3", 3200.0)] * 8 + [Links("NVIDIA H100 80GB HBM3", 400.0)] * 8
    limit = group_limit(links, num_hosts=2, num_ranks=16)
    assert limit is not None
    assert (limit.bus_gbs, limit.link) == (pytest.approx(48.0), "400 Gb/s of network")
    fast = group_limit(links[:8], num_hosts=2, num_ranks=16)
    assert fast is not None
    assert fast.link == "18 NVLinks of H100"


def test_one_rank_on_each_host_uses_no_link_between_gpus() -> None:
    limit = group_limit([Links("something new", 100.0)] * 2, num_hosts=2, num_ranks=2)
    assert limit is not None
    assert limit.bus_gbs == pytest.approx(12.0)


def test_one_unknown_link_leaves_the_limit_unknown() -> None:
    assert network_limit(Links("x", None)) is None
    known, unknown = Links("NVIDIA H200", 400.0), Links("NVIDIA H200", None)
    assert group_limit([known, unknown], num_hosts=2, num_ranks=2) is None
    assert group_limit([known, Links(None, 400.0)], num_hosts=1, num_ranks=2) is None
    assert group_limit([], num_hosts=1, num_ranks=1) is None
