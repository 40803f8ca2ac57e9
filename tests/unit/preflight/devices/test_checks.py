"""Whole hosts, through the checks as a preflight runs them."""

from collections.abc import Callable
from pathlib import Path

from elastictrain.preflight.check import run_checks
from elastictrain.preflight.devices.checks import LocalDevices, device_checks
from elastictrain.preflight.surroundings import Surroundings, ToolOutput
from elastictrain.preflight.verdict import Status, Verdict

Host = Callable[..., Surroundings]
Answered = Callable[..., ToolOutput]
NVIDIA_GPU = {"/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:1b:00.0/class": "0x030200"}
SWITCH = {"/sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:05:00.0/class": "0x068000"}


def verdicts(surroundings: Surroundings, tmp_path: Path, *, ranks: int | None = 2) -> list[Verdict]:
    checks = device_checks(LocalDevices(surroundings), local_world_size=ranks, last_counters=tmp_path / "counters.json")
    return run_checks(checks, subject="h1")


def by_check(found: list[Verdict]) -> dict[str, Status]:
    return {verdict.check: verdict.status for verdict in found}


def test_a_host_without_gpus_says_so_once(host: Host, tmp_path: Path) -> None:
    (found,) = verdicts(host(), tmp_path)
    assert (found.check, found.status, found.measured) == ("gpus", Status.SKIP, "no GPU")


def test_a_healthy_machine_with_switches(host: Host, answered: Answered, tmp_path: Path) -> None:
    tools = {
        "nvidia-smi -q -x": answered("nvidia_smi_550_h100.xml"),
        "nvidia-smi nvlink": answered("nvlink_h100.txt"),
        "nvidia-smi topo": answered("topo_h100.txt"),
        "dmesg": answered("dmesg_clean.txt"),
    }
    surroundings = host(NVIDIA_GPU | SWITCH, tools)
    found = verdicts(surroundings, tmp_path)
    assert by_check(found) == dict.fromkeys(
        ["gpus", "fabric_manager", "ecc", "row_remap", "xid", "throttle", "pcie", "nvlink"], Status.PASS
    )
    asked = surroundings.tools.asked  # type: ignore[attr-defined]
    assert asked.count("nvidia-smi -q -x") == 1


def test_a_sick_machine(host: Host, answered: Answered, tmp_path: Path) -> None:
    tools = {
        "nvidia-smi -q -x": answered("nvidia_smi_525_a100.xml"),
        "nvidia-smi nvlink": answered("nvlink_a100_down.txt"),
        "dmesg": answered("dmesg_xids.txt"),
        "systemctl": ToolOutput(3, "failed\n", ""),
    }
    found = by_check(verdicts(host(NVIDIA_GPU | SWITCH, tools), tmp_path, ranks=8))
    assert {name for name, status in found.items() if status is Status.FAIL} == {
        "gpus",
        "fabric_manager",
        "row_remap",
        "xid",
        "nvlink",
    }
    assert found["throttle"] is Status.WARN


def test_a_gpu_that_is_hidden_because_it_is_ill(host: Host, answered: Answered, tmp_path: Path) -> None:
    log = ToolOutput(0, "NVRM: Xid (PCI:0000:23:00): 79, GPU has fallen off the bus.\n", "")
    tools = {"nvidia-smi -q -x": answered("nvidia_smi_570_h200.xml"), "dmesg": log}
    sick = by_check(verdicts(host(NVIDIA_GPU, tools, {"CUDA_VISIBLE_DEVICES": "0,1"}), tmp_path))
    assert (sick["ecc"], sick["row_remap"], sick["xid"]) == (Status.FAIL, Status.WARN, Status.FAIL)
    well = by_check(verdicts(host(NVIDIA_GPU, tools, {"CUDA_VISIBLE_DEVICES": "0"}), tmp_path, ranks=1))
    assert (well["ecc"], well["row_remap"], well["xid"]) == (Status.PASS, Status.PASS, Status.PASS)
    hidden = by_check(verdicts(host(NVIDIA_GPU, tools, {"CUDA_VISIBLE_DEVICES": ""}), tmp_path))
    assert (hidden["gpus"], "ecc" in hidden) == (Status.SKIP, False)


def test_amd(host: Host, answered: Answered, tmp_path: Path) -> None:
    tools = {
        "rocm-smi": answered("rocm_smi_6.json"),
        "amd-smi": answered("amd_smi_6.json"),
        # Images often bring this along.
        "nvidia-smi": answered("nvidia_smi_no_driver.txt", returncode=9),
    }
    found = verdicts(host(tools=tools), tmp_path)
    assert by_check(found) | {"row_remap": Status.SKIP, "pcie": Status.SKIP} == {
        "gpus": Status.PASS,
        "ecc": Status.FAIL,
        "row_remap": Status.SKIP,
        "throttle": Status.WARN,
        "pcie": Status.SKIP,
        "nvlink": Status.WARN,
    }


def test_counters_from_one_preflight_to_the_next(host: Host, tmp_path: Path) -> None:
    files = {
        "/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "0",
        "/proc/sys/kernel/random/boot_id": "a",
        "/proc/uptime": "100 1",
    }
    assert by_check(verdicts(host(files), tmp_path))["counters"] is Status.SKIP
    assert by_check(verdicts(host(files), tmp_path))["counters"] is Status.PASS
    files["/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed"] = "4"
    assert by_check(verdicts(host(files), tmp_path))["counters"] is Status.FAIL
    assert by_check(verdicts(host(files), tmp_path))["counters"] is Status.PASS


def test_counters_that_cannot_be_kept(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    devices = LocalDevices(host({"/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "0"}))
    checks = device_checks(devices, local_world_size=None, last_counters=tmp_path / "file" / "counters.json")
    found = [verdict for verdict in run_checks(checks, subject="h1") if verdict.check == "counters"]
    assert [verdict.status for verdict in found] == [Status.SKIP, Status.WARN]


def test_a_hanging_tool_is_asked_once_and_named(host: Host, tmp_path: Path) -> None:
    surroundings = host(NVIDIA_GPU, {"nvidia-smi": ToolOutput(-1, "", "", timed_out=True)})
    found = verdicts(surroundings, tmp_path)
    assert [(verdict.check, verdict.status) for verdict in found] == [("gpus", Status.FAIL), ("xid", Status.SKIP)]
    assert len([line for line in surroundings.tools.asked if line.startswith("nvidia-smi")]) == 1  # type: ignore[attr-defined]
