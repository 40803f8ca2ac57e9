from collections.abc import Callable

from elastictrain.preflight.devices.nvidia import parse_nvidia
from elastictrain.preflight.devices.pci import AMD, NVIDIA, Lanes, gpu_lanes, judge_pcie, read_pci, read_port_lanes
from elastictrain.preflight.surroundings import Surroundings, ToolOutput
from elastictrain.preflight.verdict import Status


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
    assert (facts.gpus_of(NVIDIA), facts.gpus_of(AMD), facts.switches) == (["0000:1b:00.0"], ["0000:83:00.0"], 2)
    assert read_pci(host({"/sys/bus/pci/devices/0000:1b:00.0/vendor": "garbled"})).gpus_of(NVIDIA) == []


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
    assert read_port_lanes(host(files)) == [
        Lanes("mlx5_0 on h1", "0000:18:00.0", 8, 16),
        Lanes("ens8 on h1", "ens8", None, 255),
    ]


def test_only_lanes_count(answered: Callable[..., ToolOutput]) -> None:
    healthy = gpu_lanes(parse_nvidia(answered("nvidia_smi_550_h100.xml")), "h1")
    (found,) = judge_pcie(healthy, host="h1")
    assert (found.status, found.measured) == (Status.PASS, "2 links at full width")
    narrow = gpu_lanes(parse_nvidia(answered("nvidia_smi_560_rtx4090.xml")), "h1")
    (found,) = judge_pcie([*healthy, *narrow], host="h1")
    assert (found.status, found.subject, found.measured, found.expected) == (Status.WARN, "GPU 0 on h1", 8, 16)
    assert "lspci -vv -s 0000:01:00.0" in found.remedy


def test_unknown_widths_and_no_device_at_all(answered: Callable[..., ToolOutput]) -> None:
    unknown = gpu_lanes(parse_nvidia(answered("nvidia_smi_garbled_values.xml")), "h1")
    assert [found.status for found in judge_pcie(unknown, host="h1")] == [Status.SKIP]
    assert judge_pcie([], host="h1") == []
