from collections.abc import Callable

import pytest

from elastictrain.preflight.devices.fabric import (
    FabricFacts,
    judge_fabric,
    parse_service,
    parse_version,
    read_driver_version,
    read_fabric,
    switched_fabric,
)
from elastictrain.preflight.devices.gpu import Gpu, GpuReport, Vendor
from elastictrain.preflight.devices.nvidia import parse_nvidia
from elastictrain.preflight.surroundings import Surroundings, ToolOutput
from elastictrain.preflight.verdict import Status, Verdict

A100 = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", driver="535.161.08", gpus=(Gpu(index=0),))


def judge(service: str | None, version: str | None, report: GpuReport | None = A100, *, switched: bool = True) -> list[Verdict]:
    return judge_fabric(FabricFacts(service, version, report.driver if report else None), report, switched=switched, host="h1")


def test_active_in_the_drivers_version() -> None:
    (found,) = judge("active", "535.161.08")
    assert (found.status, found.measured) == (Status.PASS, "active, 535.161.08")


@pytest.mark.parametrize("state", ["inactive", "failed", "activating"])
def test_not_active(state: str) -> None:
    (found,) = judge(state, "535.161.08")
    assert (found.status, found.measured) == (Status.FAIL, state)
    assert "systemctl enable --now nvidia-fabricmanager" in found.remedy


def test_another_version_than_the_drivers() -> None:
    (found,) = judge("active", "535.129.03")
    assert (found.status, found.expected) == (Status.WARN, "version 535.161.08, as the driver")
    assert "nvidia-fabricmanager-535" in found.remedy
    assert judge("failed", "535.129.03")[0].status is Status.FAIL
    new = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", driver="580.65.06", gpus=(Gpu(index=0),))
    assert "install nvidia-fabricmanager in exactly the driver's version 580.65.06" in judge("inactive", None, new)[0].remedy


def test_nobody_can_tell_in_a_container() -> None:
    (found,) = judge(None, None)
    assert found.status is Status.SKIP


def test_without_switches_it_does_not_apply() -> None:
    assert judge("inactive", None, switched=False) == []
    assert not switched_fabric(A100, num_switches=0)
    assert switched_fabric(A100, num_switches=6)
    assert switched_fabric(None, num_switches=6)


def test_what_gpus_say_goes_first(answered: Callable[..., ToolOutput]) -> None:
    joined = parse_nvidia(answered("nvidia_smi_550_h100.xml"))
    assert switched_fabric(joined, num_switches=0)
    # In a container, and on rack-scale machines, there is no such service.
    assert judge("inactive", None, joined)[0].status is Status.PASS
    assert judge(None, None, joined)[0].status is Status.PASS
    waiting = parse_nvidia(answered("nvidia_smi_550_h100_fabric_waits.xml"))
    (found,) = judge("inactive", None, waiting)
    assert (found.status, found.subject, found.measured) == (Status.FAIL, "GPU 0 on h1", "In Progress")
    (stuck,) = judge("active", "550.54.15", waiting)
    assert "systemctl restart" in stuck.remedy
    failed = GpuReport(
        vendor=Vendor.NVIDIA,
        tool="nvidia-smi",
        gpus=(Gpu(index=0, fabric_state="Completed", fabric_status="Insufficient Resources"),),
    )
    assert judge("active", None, failed)[0].status is Status.FAIL


def test_answers_of_the_tools(
    host: Callable[..., Surroundings], answered: Callable[..., ToolOutput], recorded: Callable[[str], str]
) -> None:
    assert parse_version(recorded("fabric_version.txt")) == "535.161.08"
    assert parse_version("nonsense") is None
    assert parse_service("active\n") == "active"
    assert parse_service("System has not been booted with systemd as init system (PID 1). Can't operate.") is None
    tools = {"systemctl is-active": ToolOutput(3, "inactive\n", ""), "nv-fabricmanager": answered("fabric_version.txt")}
    files = {"/proc/driver/nvidia/version": recorded("driver_version_closed.txt")}
    assert read_fabric(host(files, tools), None) == FabricFacts("inactive", "535.161.08", "535.161.08")


@pytest.mark.parametrize(("name", "version"), [("closed", "535.161.08"), ("open", "570.124.06")])
def test_the_loaded_driver(name: str, version: str, host: Callable[..., Surroundings], recorded: Callable[[str], str]) -> None:
    assert read_driver_version(host({"/proc/driver/nvidia/version": recorded(f"driver_version_{name}.txt")})) == version


def test_no_driver_is_loaded(host: Callable[..., Surroundings]) -> None:
    assert read_driver_version(host()) is None
