from collections.abc import Callable
from pathlib import Path

import pytest

from elastictrain.preflight.host.gpu import Gpu, GpuReport, Trouble, Vendor
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.host.visible import (
    Lanes,
    PciFacts,
    check_visible,
    judge_pcie,
    read_lanes,
    read_pci,
    select,
)
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.preflight.made import gpu, port

GPUS = tuple(Gpu(index=i, bus=f"0000:{i:02x}:00.0", uuid=f"GPU-{i}abc", name="NVIDIA H200") for i in range(4))
WHOLE = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=GPUS)
NOWHERE = Path("/there-is-no-such-root")
NOTHING = PciFacts()
ONE_ON_BUS = PciFacts(nvidia=("0000:3b:00.0",))


def judge(
    report: GpuReport | None,
    *,
    pci: PciFacts = NOTHING,
    root: Path = NOWHERE,
    needed: int | None = None,
    **environment: str,
) -> list[Verdict]:
    surroundings = Surroundings(host="h1", root=root, environment=environment)
    return check_visible(surroundings, report, pci=pci, local_world_size=needed)


@pytest.mark.parametrize(
    ("value", "indices", "unknown"),
    [
        ("0,1", [0, 1], ""),
        ("3, 2", [3, 2], ""),
        ("GPU-2abc,GPU-0", [2, 0], ""),
        ("", [], ""),
        ("-1", [], ""),
        ("NoDevFiles", [], ""),
        ("0,9,1", [0], "9"),
        ("0,-1,1", [0], "-1"),
        ("GPU-", [], "GPU-"),
        ("1,1", [1], "1"),
        ("0,", [0], "(empty)"),
    ],
)
def test_which_gpus_a_variable_leaves(value: str, indices: list[int], unknown: str) -> None:
    selection = select(GPUS, {"CUDA_VISIBLE_DEVICES": value}, Vendor.NVIDIA)
    assert ([gpu.index for gpu in selection.gpus], selection.unknown) == (indices, unknown)


def test_on_amd_one_variable_selects_from_what_another_left() -> None:
    selection = select(
        GPUS, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, Vendor.AMD
    )
    assert [gpu.index for gpu in selection.gpus] == [3]
    assert select(GPUS, {"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}, Vendor.AMD).gpus == (GPUS[2],)
    assert select(GPUS, {"HIP_VISIBLE_DEVICES": "2"}, Vendor.NVIDIA).gpus == GPUS


def test_as_many_as_ranks_or_more() -> None:
    (found,) = judge(WHOLE, needed=4)
    assert (found.status, found.measured, found.expected) == (Status.PASS, WHOLE.counted_names(), 4)
    assert judge(WHOLE, needed=None)[0].status is Status.PASS
    assert judge(WHOLE, needed=2, CUDA_VISIBLE_DEVICES="0,3")[0].status is Status.PASS


def test_fewer_than_ranks() -> None:
    (found,) = judge(WHOLE, needed=8)
    assert (found.status, found.measured) == (Status.FAIL, "4 GPUs")
    assert "--nproc-per-node=4" in found.remedy
    (hidden,) = judge(WHOLE, needed=4, CUDA_VISIBLE_DEVICES="0,1")
    assert hidden.status is Status.FAIL
    assert "unset CUDA_VISIBLE_DEVICES" in hidden.remedy


def test_hidden_on_purpose_is_a_run_on_cpus() -> None:
    (found,) = judge(WHOLE, needed=4, CUDA_VISIBLE_DEVICES="")
    assert found.status is Status.SKIP


def test_an_entry_that_names_no_gpu() -> None:
    (found,) = judge(WHOLE, needed=3, CUDA_VISIBLE_DEVICES="0,1,7")
    assert found.status is Status.FAIL
    assert "'7'" in str(found.measured)
    assert judge(WHOLE, needed=2, CUDA_VISIBLE_DEVICES="0,1,7")[0].status is Status.WARN


def test_a_host_without_gpus_is_no_trouble() -> None:
    for report in (None, GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", trouble=Trouble.NO_DRIVER, whole=False)):
        (found,) = judge(report, needed=2)
        assert (found.status, found.measured) == (Status.SKIP, "no GPU")


def test_gpus_without_a_driver() -> None:
    (found,) = judge(None, pci=ONE_ON_BUS)
    assert found.status is Status.WARN
    broken = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", trouble=Trouble.NO_DRIVER, detail="failed", whole=False)
    (found,) = judge(broken, pci=ONE_ON_BUS)
    assert (found.status, found.expected) == (Status.FAIL, "1 GPUs")
    assert "modprobe nvidia" in found.remedy
    amd = GpuReport(vendor=Vendor.AMD, tool="rocm-smi", trouble=Trouble.NO_DRIVER, whole=False)
    (found,) = judge(amd, pci=PciFacts(amd=("0000:83:00.0",)))
    assert "modprobe amdgpu" in found.remedy


def test_a_container_that_was_given_none() -> None:
    (found,) = judge(None, pci=ONE_ON_BUS, NVIDIA_VISIBLE_DEVICES="void")
    assert found.status is Status.SKIP
    assert "--gpus all" in found.remedy


@pytest.mark.parametrize("trouble", [Trouble.NO_ANSWER, Trouble.MISMATCH, Trouble.GARBLED])
def test_a_tool_in_trouble(trouble: Trouble) -> None:
    (found,) = judge(GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", trouble=trouble, detail="said so", whole=False))
    assert found.status is (Status.WARN if trouble is Trouble.GARBLED else Status.FAIL)


def test_a_lost_gpu(answered: Callable[..., ToolOutput]) -> None:
    (found,) = judge(parse_nvidia(answered("nvidia_smi_lost.txt")), needed=8)
    assert (found.status, found.subject) == (Status.FAIL, gpu("0000:3b:00.0"))
    assert "power-cycle" in found.remedy


def test_a_gpu_that_the_driver_has_and_the_tool_does_not_list(host: Callable[..., Surroundings]) -> None:
    files = {f"/proc/driver/nvidia/gpus/{bus}/information": "" for bus in ("0000:00:00.0", "0000:3b:00.0")}
    (found,) = judge(WHOLE, root=host(files).root, needed=4)
    assert (found.status, str(found.measured).split()[-1]) == (Status.WARN, "0000:3b:00.0")


def test_what_the_driver_asks_for(answered: Callable[..., ToolOutput]) -> None:
    (reset,) = judge(parse_nvidia(answered("nvidia_smi_525_a100.xml")), needed=2)
    assert (reset.status, reset.subject) == (Status.FAIL, gpu(1))
    assert all(word in reset.remedy for word in ("--gpu-reset", "0000:0f:00.0"))
    (drain,) = judge(parse_nvidia(answered("nvidia_smi_570_h200.xml")), needed=2)
    assert drain.status is Status.WARN
    reboot = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=(Gpu(index=0, recovery="Reboot"),))
    assert judge(reboot)[0].remedy.split()[0] == "reboot"


def test_mig_with_more_than_one_rank(answered: Callable[..., ToolOutput]) -> None:
    report = parse_nvidia(answered("nvidia_smi_535_a100_mig.xml"))
    assert judge(report, needed=1)[0].status is Status.PASS
    two = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=(Gpu(index=0, mig=True), Gpu(index=1, mig=True)))
    (found,) = judge(two, needed=2)
    assert (found.status, "MIG" in str(found.measured)) == (Status.WARN, True)


def test_gpus_of_two_kinds_and_an_answer_cut_short() -> None:
    mixed = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=(GPUS[0], Gpu(index=1, name="NVIDIA L4")))
    assert [verdict.status for verdict in judge(mixed)] == [Status.WARN]
    short = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=GPUS, whole=False)
    assert [(verdict.status, "nvidia-smi" in str(verdict.measured)) for verdict in judge(short)] == [(Status.WARN, True)]


def test_gpus_and_switches_on_the_bus(host: Callable[..., Surroundings]) -> None:
    devices = {
        "0000:00:00.0": ("0x8086", "0x060000"),
        "0000:1b:00.0": ("0x10de", "0x030200"),
        "0000:05:00.0": ("0x10de", "0x068000"),
        "0000:06:00.0": ("0x10de", "0x068000"),
        "0000:07:00.1": ("0x10de", "0x040300"),
        "0000:83:00.0": ("0x1002", "0x120000"),
    }
    files = {
        f"/sys/bus/pci/devices/{address}/{name}": value
        for address, (vendor, kind) in devices.items()
        for name, value in (("vendor", vendor), ("class", kind))
    }
    facts = read_pci(host(files))
    assert (list(facts.nvidia), list(facts.amd), facts.switches) == (["0000:1b:00.0"], ["0000:83:00.0"], 2)
    assert read_pci(host({"/sys/bus/pci/devices/0000:1b:00.0/vendor": "garbled"})).nvidia == ()


def test_ports_that_matter(host: Callable[..., Surroundings]) -> None:
    files = {
        "/sys/class/infiniband/mlx5_0/device/current_link_width": "8",
        "/sys/class/infiniband/mlx5_0/device/max_link_width": "16",
        "/sys/class/infiniband/mlx5_0/device/uevent": "DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:18:00.0\n",
        "/sys/class/net/eth0/speed": "1000",
        "/sys/class/net/eth0/device/current_link_width": "1",
        "/sys/class/net/eth0/device/max_link_width": "4",
        "/sys/class/net/ens8/speed": "100000",
        "/sys/class/net/ens8/device/current_link_width": "0",
        "/sys/class/net/ens8/device/max_link_width": "255",
        "/sys/class/net/lo/mtu": "65536",
    }
    assert read_lanes(host(files), None) == [
        Lanes(port("mlx5_0"), "0000:18:00.0", 8, 16),
        Lanes(port("ens8"), "ens8", None, 255),
    ]


def test_only_lanes_count(answered: Callable[..., ToolOutput], host: Callable[..., Surroundings]) -> None:
    healthy = read_lanes(host(), parse_nvidia(answered("nvidia_smi_550_h100.xml")))
    (found,) = judge_pcie(healthy, host="h1")
    assert (found.status, str(found.measured)[0]) == (Status.PASS, "2")
    narrow = read_lanes(host(), parse_nvidia(answered("nvidia_smi_560_rtx4090.xml")))
    (found,) = judge_pcie([*healthy, *narrow], host="h1")
    assert (found.status, found.subject, found.measured, found.expected) == (Status.WARN, gpu(0), 8, 16)
    assert "0000:01:00.0" in found.remedy


def test_unknown_widths_and_no_device_at_all(answered: Callable[..., ToolOutput], host: Callable[..., Surroundings]) -> None:
    unknown = read_lanes(host(), parse_nvidia(answered("nvidia_smi_garbled_values.xml")))
    assert [found.status for found in judge_pcie(unknown, host="h1")] == [Status.SKIP]
    assert judge_pcie([], host="h1") == []
