import pytest

from elastictrain.preflight.group.expected import Links, find_model, group_limit, local_limit, network_limit


@pytest.mark.parametrize(
    ("gpu", "num_nvlinks", "gbs", "link"),
    [
        ("NVIDIA H200", None, 370.8, "18 NVLinks of H200"),
        ("NVIDIA H100 80GB HBM3", None, 370.8, "18 NVLinks of H100"),
        ("NVIDIA H100 80GB HBM3", 17, 350.2, "17 NVLinks of H100"),
        ("NVIDIA H100 PCIe", None, 48.0, "PCIe of H100 PCIe"),
        ("NVIDIA H100 NVL", 12, 247.2, "12 NVLinks of H100 NVL"),
        ("NVIDIA H200 NVL", None, 48.0, "PCIe of H200 NVL"),
        ("NVIDIA H20", None, 370.8, "18 NVLinks of H20"),
        ("NVIDIA H800", None, 164.8, "8 NVLinks of H800"),
        ("NVIDIA B200", None, 721.8, "18 NVLinks of B200"),
        ("NVIDIA GB200", None, 721.8, "18 NVLinks of GB200"),
        ("NVIDIA A100-SXM4-80GB", None, 240.0, "12 NVLinks of A100-SXM"),
        ("NVIDIA A100 80GB PCIe", None, 24.0, "PCIe of A100"),
        ("NVIDIA A100-PCIE-40GB", 12, 240.0, "12 NVLinks of A100"),
        ("Tesla V100-SXM2-32GB", None, 120.0, "6 NVLinks of V100-SXM"),
        ("NVIDIA L40S", None, 24.0, "PCIe of L40S"),
        ("NVIDIA L40S", 0, 24.0, "PCIe of L40S"),
        ("NVIDIA GeForce RTX 4090", None, 24.0, "PCIe of RTX 4090"),
        ("Tesla T4", None, 12.0, "PCIe of T4"),
    ],
)
def test_gpus_by_name(gpu: str, num_nvlinks: int | None, gbs: float, link: str) -> None:
    limit = local_limit(Links(gpu, num_nvlinks, None))
    assert limit is not None
    assert (limit.bus_gbs, limit.link) == (pytest.approx(gbs), link)


@pytest.mark.parametrize("gpu", [None, "", "AMD Instinct MI300X", "something new"])
def test_unknown_gpus_are_unknown(gpu: str | None) -> None:
    assert find_model(gpu) is None
    assert local_limit(Links(gpu, None, None)) is None


def test_what_was_measured_between_two_h200_is_well_above_the_threshold() -> None:
    limit = group_limit([Links("NVIDIA H200", None, None)] * 2, num_hosts=1, num_ranks=2)
    assert limit is not None
    assert 1.2 * 0.7 * limit.bus_gbs < 330
    assert limit.bus_gbs >= 330


def test_the_network_of_several_hosts() -> None:
    links = [Links("NVIDIA H100 80GB HBM3", None, 3200.0)] * 8 + [Links("NVIDIA H100 80GB HBM3", None, 400.0)] * 8
    limit = group_limit(links, num_hosts=2, num_ranks=16)
    assert limit is not None
    assert (limit.bus_gbs, limit.link) == (pytest.approx(48.0), "400 Gb/s of network")
    fast = group_limit(links[:8], num_hosts=2, num_ranks=16)
    assert fast is not None
    assert fast.link == "18 NVLinks of H100"


def test_one_rank_on_each_host_uses_no_link_between_gpus() -> None:
    limit = group_limit([Links("something new", None, 100.0)] * 2, num_hosts=2, num_ranks=2)
    assert limit is not None
    assert limit.bus_gbs == pytest.approx(12.0)


def test_one_unknown_link_leaves_the_limit_unknown() -> None:
    assert network_limit(Links("x", None, None)) is None
    known, unknown = Links("NVIDIA H200", None, 400.0), Links("NVIDIA H200", None, None)
    assert group_limit([known, unknown], num_hosts=2, num_ranks=2) is None
    assert group_limit([known, Links(None, None, 400.0)], num_hosts=1, num_ranks=2) is None
    assert group_limit([], num_hosts=1, num_ranks=1) is None
