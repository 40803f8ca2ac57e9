"""Whole hosts, through the checks as a preflight runs them; every check can be configured, and every key is a check."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from elastictrain.config.preflight import PreflightChecks
from elastictrain.preflight.check import run_checks
from elastictrain.preflight.group.checks import CHECKS
from elastictrain.preflight.host_checks import OwnChecks, check_host, device_checks, host_checks
from elastictrain.preflight.policy import Level
from elastictrain.preflight.surroundings import Surroundings, ToolOutput
from elastictrain.preflight.verdict import Status, Verdict
from tests.unit.preflight.transport.made import MadeHost

Host = Callable[..., Surroundings]
Answered = Callable[..., ToolOutput]
NVIDIA_GPU = {"/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:1b:00.0/class": "0x030200"}
BETWEEN_HOSTS = {"alike", "interface", "infiniband", "roster", "clock", "reachable", "mtu", "latency", "bandwidth"}
SWITCH = {"/sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:05:00.0/class": "0x068000"}


def verdicts(surroundings: Surroundings, *, ranks: int | None = 2) -> list[Verdict]:
    return run_checks(device_checks(surroundings, OwnChecks(level=Level.FULL, local_world_size=ranks)), subject="h1")


def by_check(found: list[Verdict]) -> dict[str, Status]:
    return {verdict.check: verdict.status for verdict in found}


def test_a_host_without_gpus_says_so_once(host: Host) -> None:
    (found,) = verdicts(host())
    assert (found.check, found.status, found.measured) == ("gpus", Status.SKIP, "no GPU")


def test_a_healthy_machine_with_switches(host: Host, answered: Answered) -> None:
    tools = {
        "nvidia-smi -q -x": answered("nvidia_smi_550_h100.xml"),
        "nvidia-smi nvlink": answered("nvlink_h100.txt"),
        "nvidia-smi topo": answered("topo_h100.txt"),
        "dmesg": answered("dmesg_clean.txt"),
    }
    surroundings = host(NVIDIA_GPU | SWITCH, tools)
    found = verdicts(surroundings)
    assert by_check(found) == dict.fromkeys(
        ["gpus", "fabric_manager", "ecc", "row_remap", "xid", "throttle", "pcie", "nvlink"], Status.PASS
    )
    asked = surroundings.tools.asked  # type: ignore[attr-defined]
    assert asked.count("nvidia-smi -q -x") == 1


def test_a_sick_machine(host: Host, answered: Answered) -> None:
    tools = {
        "nvidia-smi -q -x": answered("nvidia_smi_525_a100.xml"),
        "nvidia-smi nvlink": answered("nvlink_a100_down.txt"),
        "dmesg": answered("dmesg_xids.txt"),
        "systemctl": ToolOutput(3, "failed\n", ""),
    }
    found = by_check(verdicts(host(NVIDIA_GPU | SWITCH, tools), ranks=8))
    assert {name for name, status in found.items() if status is Status.FAIL} == {
        "gpus",
        "fabric_manager",
        "row_remap",
        "xid",
        "nvlink",
    }
    assert found["throttle"] is Status.WARN


def test_a_gpu_that_is_hidden_because_it_is_ill(host: Host, answered: Answered) -> None:
    log = ToolOutput(0, "NVRM: Xid (PCI:0000:23:00): 79, GPU has fallen off the bus.\n", "")
    tools = {"nvidia-smi -q -x": answered("nvidia_smi_570_h200.xml"), "dmesg": log}
    sick = by_check(verdicts(host(NVIDIA_GPU, tools, {"CUDA_VISIBLE_DEVICES": "0,1"})))
    assert (sick["ecc"], sick["row_remap"], sick["xid"]) == (Status.FAIL, Status.WARN, Status.FAIL)
    well = by_check(verdicts(host(NVIDIA_GPU, tools, {"CUDA_VISIBLE_DEVICES": "0"}), ranks=1))
    assert (well["ecc"], well["row_remap"], well["xid"]) == (Status.PASS, Status.PASS, Status.PASS)
    hidden = by_check(verdicts(host(NVIDIA_GPU, tools, {"CUDA_VISIBLE_DEVICES": ""})))
    assert (hidden["gpus"], "ecc" in hidden) == (Status.SKIP, False)


def test_amd(host: Host, answered: Answered) -> None:
    tools = {
        "rocm-smi": answered("rocm_smi_6.json"),
        "amd-smi": answered("amd_smi_6.json"),
        # Images often bring this along.
        "nvidia-smi": answered("nvidia_smi_no_driver.txt", returncode=9),
    }
    found = verdicts(host(tools=tools))
    assert by_check(found) | {"row_remap": Status.SKIP, "pcie": Status.SKIP} == {
        "gpus": Status.PASS,
        "ecc": Status.FAIL,
        "row_remap": Status.SKIP,
        "throttle": Status.WARN,
        "pcie": Status.SKIP,
        "nvlink": Status.WARN,
    }


def test_counters_from_one_preflight_to_the_next(host: Host) -> None:
    files = {
        "/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "0",
        "/proc/sys/kernel/random/boot_id": "a",
        "/proc/uptime": "100 1",
    }
    assert by_check(verdicts(host(files)))["counters"] is Status.SKIP
    assert by_check(verdicts(host(files)))["counters"] is Status.PASS
    files["/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed"] = "4"
    assert by_check(verdicts(host(files)))["counters"] is Status.FAIL
    assert by_check(verdicts(host(files)))["counters"] is Status.PASS


def test_counters_that_cannot_be_kept(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = {"/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "0"}
    surroundings = host(files, environment={"XDG_STATE_HOME": str(tmp_path / "file")})
    found = [verdict for verdict in verdicts(surroundings, ranks=None) if verdict.check == "counters"]
    assert [verdict.status for verdict in found] == [Status.SKIP, Status.WARN]


def test_a_hanging_tool_is_asked_once_and_named(host: Host) -> None:
    surroundings = host(NVIDIA_GPU, {"nvidia-smi": ToolOutput(-1, "", "", timed_out=True)})
    found = verdicts(surroundings)
    assert [(verdict.check, verdict.status) for verdict in found] == [("gpus", Status.FAIL), ("xid", Status.SKIP)]
    assert len([line for line in surroundings.tools.asked if line.startswith("nvidia-smi")]) == 1  # type: ignore[attr-defined]


def check(made: MadeHost, name: str) -> tuple[Status, object]:
    modes = {field.name: "off" for field in fields(PreflightChecks) if field.name != name}
    surroundings = Surroundings(host="h1", root=made.root, environment=made.environment)
    (found,) = check_host(surroundings, OwnChecks(level=Level.QUICK, modes=modes))
    return found.status, found.expected


def test_locked_memory_matters_where_infiniband_will_be_used(tmp_path: Path) -> None:
    made = MadeHost(tmp_path / "root", environment={"XDG_STATE_HOME": str(tmp_path)})
    assert check(made, "memlock") == (Status.PASS, None)
    made.device("mlx5_0", state="1: DOWN")
    assert check(made, "memlock") == (Status.PASS, None)
    made.device("mlx5_0")
    assert str(check(made, "memlock")[1]).startswith("unlimited")
    made.environment["NCCL_IB_DISABLE"] = "1"
    assert check(made, "memlock") == (Status.PASS, None)


def test_the_keys_are_the_checks(tmp_path: Path) -> None:
    surroundings, asked = Surroundings(root=tmp_path, environment={}), OwnChecks(level=Level.FULL)
    own = [*host_checks(surroundings, asked), *device_checks(surroundings, asked)]
    assert {field.name for field in fields(PreflightChecks)} == {check.name for check in own} | BETWEEN_HOSTS | set(CHECKS)
