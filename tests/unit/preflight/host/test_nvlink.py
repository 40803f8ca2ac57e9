from collections.abc import Callable
from pathlib import Path

import pytest

from elastictrain.preflight.host.gpu import Gpu, GpuReport, Vendor
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.host.nvlink import (
    GpuLinks,
    check_fabric,
    judge_nvlink,
    parse_errors,
    parse_links,
    switched_fabric,
)
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.preflight.conftest import RecordedTools
from tests.unit.preflight.made import gpu

NOWHERE = Path("/there-is-no-such-root")
Recorded = Callable[[str], str]
Host = Callable[..., Surroundings]
A100 = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", driver="535.161.08", gpus=(Gpu(index=0),))


def checked(service: str | None, version: str | None, report: GpuReport | None = A100) -> list[Verdict]:
    """On a host where systemd says this of the service, with this version of the installed program."""
    told = {"nv-fabricmanager": f"Fabric Manager version is : {version}\n", "systemctl is-active": f"{service}\n"}
    tools = {name: ToolOutput(0, text, "") for name, text in told.items() if "None" not in text}
    return check_fabric(Surroundings(host="h1", root=NOWHERE, tools=RecordedTools(tools)), report, num_switches=1)


def test_active_in_the_drivers_version() -> None:
    (found,) = checked("active", "535.161.08")
    assert (found.status, found.measured) == (Status.PASS, "active, 535.161.08")


@pytest.mark.parametrize("state", ["inactive", "failed", "activating"])
def test_not_active(state: str) -> None:
    (found,) = checked(state, "535.161.08")
    assert (found.status, found.measured) == (Status.FAIL, state)
    assert "systemctl enable" in found.remedy


def test_another_version_than_the_drivers() -> None:
    (found,) = checked("active", "535.129.03")
    assert (found.status, "535.161.08" in str(found.expected)) == (Status.WARN, True)
    assert "nvidia-fabricmanager-535" in found.remedy
    assert checked("failed", "535.129.03")[0].status is Status.FAIL
    # Whether it runs is not known.
    assert [(found.status, found.measured) for found in checked(None, "535.129.03")] == [(Status.FAIL, "version 535.129.03")]
    new = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", driver="580.65.06", gpus=(Gpu(index=0),))
    assert "install nvidia-fabricmanager in exactly the driver's version 580.65.06" in checked("inactive", None, new)[0].remedy


def test_nobody_can_tell_in_a_container() -> None:
    (found,) = checked(None, None)
    assert found.status is Status.SKIP


def test_without_switches_it_does_not_apply(host: Host) -> None:
    assert check_fabric(host(), A100, num_switches=0) == []
    assert not switched_fabric(A100, num_switches=0)
    assert switched_fabric(A100, num_switches=6)
    assert switched_fabric(None, num_switches=6)


def test_what_gpus_say_goes_first(answered: Callable[..., ToolOutput]) -> None:
    joined = parse_nvidia(answered("nvidia_smi_550_h100.xml"))
    assert switched_fabric(joined, num_switches=0)
    # In a container, and on rack-scale machines, there is no such service.
    assert checked("inactive", None, joined)[0].status is Status.PASS
    assert checked(None, None, joined)[0].status is Status.PASS
    waiting = parse_nvidia(answered("nvidia_smi_550_h100_fabric_waits.xml"))
    (found,) = checked("inactive", None, waiting)
    assert (found.status, found.subject, found.measured) == (Status.FAIL, gpu(0), "In Progress")
    (stuck,) = checked("active", "550.54.15", waiting)
    assert "systemctl restart" in stuck.remedy
    failed = GpuReport(
        vendor=Vendor.NVIDIA,
        tool="nvidia-smi",
        gpus=(Gpu(index=0, fabric_state="Completed", fabric_status="Insufficient Resources"),),
    )
    assert checked("active", None, failed)[0].status is Status.FAIL


def test_words_that_say_nothing_are_unknown(host: Host) -> None:
    said = "System has not been booted with systemd as init system (PID 1). Can't operate."
    tools = {"systemctl is-active": ToolOutput(1, "", said), "nv-fabricmanager": ToolOutput(0, "nonsense", "")}
    assert [found.status for found in check_fabric(host(tools=tools), None, num_switches=1)] == [Status.SKIP]


def test_a_service_that_is_down_and_a_recorded_version(
    host: Host, answered: Callable[..., ToolOutput], recorded: Recorded
) -> None:
    tools = {"systemctl is-active": ToolOutput(3, "inactive\n", ""), "nv-fabricmanager": answered("fabric_version.txt")}
    files = {"/proc/driver/nvidia/version": recorded("driver_version_closed.txt")}
    (found,) = check_fabric(host(files, tools), None, num_switches=1)
    assert (found.status, found.measured) == (Status.FAIL, "inactive")
    # The installed version is the driver's, so it is not to be installed again.
    assert "535" not in found.remedy


@pytest.mark.parametrize(("name", "version"), [("closed", "535.161.08"), ("open", "570.124.06")])
def test_the_loaded_driver(name: str, version: str, host: Host, recorded: Recorded) -> None:
    files = {"/proc/driver/nvidia/version": recorded(f"driver_version_{name}.txt")}
    (found,) = check_fabric(host(files, {"systemctl is-active": ToolOutput(3, "failed\n", "")}), None, num_switches=1)
    assert version in found.remedy


def test_no_driver_is_loaded(host: Host) -> None:
    (found,) = check_fabric(host(tools={"systemctl is-active": ToolOutput(3, "failed\n", "")}), None, num_switches=1)
    assert (found.status, "install" in found.remedy) == (Status.FAIL, False)


def judge(links: list[GpuLinks], *, switched: bool = True, mig: bool = False) -> list[Verdict]:
    return judge_nvlink(links, switched=switched, mig=mig, num_gpus=2, host="h1")


def test_all_links_up(recorded: Recorded) -> None:
    links = parse_links(recorded("nvlink_h100.txt"))
    assert [(one.index, len(one.speeds_gbs), one.speeds_gbs[17], one.down) for one in links] == [
        (0, 18, 26.562, ()),
        (1, 18, 26.562, ()),
    ]
    (found,) = judge(links)
    assert (found.status, "26.562" in str(found.measured)) == (Status.PASS, True)


def test_links_down(recorded: Recorded) -> None:
    links = parse_links(recorded("nvlink_a100_down.txt"))
    assert links[1].down == (3, 7)
    (found,) = judge(links)
    assert (found.status, found.subject, found.measured) == (Status.FAIL, gpu(1), "10 links up, down: 3, 7")
    (bridged,) = judge(links, switched=False)
    assert bridged.status is Status.WARN


def test_a_gpu_without_any_link(recorded: Recorded) -> None:
    links = parse_links(recorded("nvlink_all_down.txt"))
    (found,) = judge(links)
    assert (found.status, found.subject, found.expected) == (Status.FAIL, gpu(1), "18 links up")
    assert judge(links, switched=False)[0].status is Status.PASS


def test_the_same_number_down_on_all_is_a_warning() -> None:
    links = [GpuLinks(0, {0: 25.0}, (1,)), GpuLinks(1, {1: 25.0}, (0,))]
    assert [found.status for found in judge(links)] == [Status.WARN, Status.WARN]


def test_a_slow_link(recorded: Recorded) -> None:
    (found,) = judge(parse_links(recorded("nvlink_h200_slow.txt")))
    assert (found.status, found.measured, found.expected, found.unit) == (Status.WARN, "link 2: 1.562", 26.56, "GB/s")


def test_no_links_and_unknown_states(recorded: Recorded) -> None:
    none = parse_links(recorded("nvlink_l4.txt"))
    assert {len(one.speeds_gbs) + len(one.down) for one in none} == {0}
    (found,) = judge(none, switched=False)
    assert (found.status, "NVLink" in str(found.measured)) == (Status.PASS, True)
    assert [one.status for one in judge(none)] == [Status.WARN]
    (odd,) = parse_links(recorded("nvlink_odd.txt"))
    assert (dict(odd.speeds_gbs), odd.down) == ({1: 53.125}, ())


def test_nobody_can_tell() -> None:
    assert [found.status for found in judge([])] == [Status.SKIP]
    assert [found.status for found in judge([], mig=True)] == [Status.SKIP]


def test_an_answer_cut_short_is_no_failure(recorded: Recorded) -> None:
    text = recorded("nvlink_h100.txt")
    (found,) = judge(parse_links(text[: text.rindex("Link 11")]))
    assert (found.status, str(found.measured)[0], found.expected) == (Status.WARN, "1", "2 GPUs")


def test_errors_of_all_links(recorded: Recorded) -> None:
    found = parse_errors(recorded("nvlink_errors_h100.txt"))
    assert found[0] == {"nvlink_replay": 0, "nvlink_recovery": 0, "nvlink_crc": 17}
    assert found[1] == {"nvlink_replay": 5, "nvlink_recovery": 1, "nvlink_crc": 0}
    assert parse_errors("Link 0: Replay Errors: 5\n") == parse_errors("") == {}
