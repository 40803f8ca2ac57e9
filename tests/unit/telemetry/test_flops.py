import pytest

from elastictrain.telemetry.flops import Precision, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-PCIE-32GB", "fp32", 14.0),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.0),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_devices_are_known_by_the_names_they_give_themselves(name: str, precision: Precision, tera: float) -> None:
    assert peak_flops(name, precision=precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla T4", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA L40", "bf16"),
        ("NVIDIA GeForce RTX 4090D", "bf16"),
        ("cpu", "fp32"),
    ],
)
def test_no_figure_is_better_than_a_wrong_one(name: str, precision: Precision) -> None:
    assert peak_flops(name, precision=precision) is None
