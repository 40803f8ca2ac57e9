"""Whole hosts, through the checks as a preflight runs them; every check can be configured, and every key is a check."""

import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from elastictrain.config.preflight import PreflightChecks
from elastictrain.preflight.host_checks import Check, HostFacts, OwnChecks, check_host, once, own_checks, run_checks
from elastictrain.preflight.policy import Level
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.surroundings import Surroundings, ToolOutput, can_load
from tests.unit.preflight.made import OF_DEVICES, OF_GROUPS, settings, verdict
from tests.unit.preflight.transport.made import MadeHost

Host = Callable[..., Surroundings]
Answered = Callable[..., ToolOutput]
NVIDIA_GPU = {"/sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:1b:00.0/class": "0x030200"}
BETWEEN_HOSTS = {"alike", "roster", "clock", "reachable", "mtu", "loss", "latency", "bandwidth"}
ASK = "nvidia-smi -q -x"
SWITCH = {"/sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:05:00.0/class": "0x068000"}


def verdicts(surroundings: Surroundings, *, ranks: int | None = 2) -> list[Verdict]:
    """What the checks of devices say."""
    checks = own_checks(HostFacts(surroundings, OwnChecks(level=Level.FULL, local_world_size=ranks)))
    return run_checks([check for check in checks if check.name in OF_DEVICES], subject="h1")


def by_check(found: list[Verdict]) -> dict[str, Status]:
    return {verdict.check: verdict.status for verdict in found}


def test_a_host_without_gpus_says_so_once(host: Host) -> None:
    (found,) = verdicts(host())
    assert (found.check, found.status, found.measured) == ("gpus", Status.SKIP, "no GPU")


def test_a_healthy_machine_with_switches(host: Host, answered: Answered) -> None:
    tools = {
        ASK: answered("nvidia_smi_550_h100.xml"),
        "nvidia-smi nvlink": answered("nvlink_h100.txt"),
        "dmesg": answered("dmesg_clean.txt"),
    }
    surroundings = host(NVIDIA_GPU | SWITCH, tools)
    found = verdicts(surroundings)
    assert by_check(found) == dict.fromkeys(
        ["gpus", "fabric_manager", "ecc", "row_remap", "xid", "throttle", "pcie", "nvlink"], Status.PASS
    ) | {"counters": Status.SKIP}
    asked = surroundings.tools.asked  # type: ignore[attr-defined]
    assert asked.count(ASK) == 1


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
    only = settings(**{field.name: "off" for field in fields(PreflightChecks) if field.name != name})
    surroundings = Surroundings(host="h1", root=made.root, environment=made.environment)
    (found,) = check_host(HostFacts(surroundings, OwnChecks(level=Level.QUICK, settings=only)))
    return found.status, found.expected


@pytest.mark.parametrize(
    ("missing", "several_hosts", "status"),
    [
        ("libibverbs.so.1", True, Status.FAIL),
        ("libibverbs.so.1", False, Status.WARN),
        ("librdmacm.so.1", True, Status.SKIP),
        ("libmlx5.so.1", True, None),
    ],
)
def test_libraries_matter_where_infiniband_will_be_used(
    missing: str, several_hosts: bool, status: Status | None, tmp_path: Path
) -> None:
    made = MadeHost(tmp_path / "root")
    only = settings(**{field.name: "off" for field in fields(PreflightChecks) if field.name != "infiniband"})
    asked = OwnChecks(level=Level.QUICK, settings=only, several_hosts=several_hosts)
    surroundings = Surroundings(
        host="h1", root=made.root, environment=made.environment, can_load=lambda library: library != missing
    )
    assert check_host(HostFacts(surroundings, asked)) == []
    made.device("mlx5_0")
    found = check_host(HostFacts(surroundings, asked))
    assert [(one.check, one.subject, one.status) for one in found] == ([("infiniband", "h1", status)] if status else [])
    assert all("libibverbs1" in one.remedy for one in found)


def test_the_dynamic_linker_is_asked() -> None:
    assert can_load("libc.so.6")
    assert not can_load("libthere_is_no_such.so.1")


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
    surroundings, asked = Surroundings(root=tmp_path, environment={}), OwnChecks(level=Level.FULL, transport=True)
    own = own_checks(HostFacts(surroundings, asked))
    assert {field.name for field in fields(PreflightChecks)} == {check.name for check in own} | BETWEEN_HOSTS | OF_GROUPS


def test_many_threads_ask_once() -> None:
    asked = []

    def ask() -> int:
        asked.append(1)
        time.sleep(0.02)
        return 7

    asking = once(ask)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(asking())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (answers, asked) == ([7] * 8, [1])


def test_nothing_is_an_answer_too_and_trouble_is_told_to_all() -> None:
    asked = []
    nothing = once(lambda: asked.append(1))
    assert (nothing(), nothing(), asked) == (None, None, [1])

    def broken() -> int:
        raise RuntimeError("no")

    asking = once(broken)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            asking()


def test_verdicts_come_in_the_order_of_checks_with_what_they_took() -> None:
    def slow() -> list:
        time.sleep(0.05)
        return [verdict(check="slow"), verdict("warn", check="slow")]

    found = run_checks([Check("slow", slow, 5.0), Check("fast", lambda: [verdict(check="fast")], 5.0)], subject="a")
    assert [(one.check, one.status) for one in found] == [("slow", "pass"), ("slow", "warn"), ("fast", "pass")]
    assert found[0].seconds >= 0.05 > found[2].seconds


def test_a_check_that_hangs_is_a_failure_and_holds_nobody_up() -> None:
    released = threading.Event()

    def hang() -> list:
        released.wait(30)
        return []

    began = time.monotonic()
    found = run_checks(
        [Check("hangs", hang, 0.1), Check("fast", lambda: [verdict(check="fast")], 5.0), Check("too", hang, 0.2)], subject="a"
    )
    assert time.monotonic() - began < 2
    released.set()
    assert [(one.check, one.status) for one in found] == [
        ("hangs", Status.FAIL),
        ("fast", Status.PASS),
        ("too", Status.FAIL),
    ]
    assert ("0.1 s" in str(found[0].measured), "0.2 s" in str(found[2].measured)) == (True, True)
    assert "preflight.checks.hangs=off" in found[0].remedy


def test_a_check_that_breaks_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    found = run_checks([Check("broken", lambda: 1 // 0, 5.0)], subject="a")  # type: ignore[arg-type, return-value]
    assert [(one.status, str(one.measured).partition(":")[0]) for one in found] == [(Status.FAIL, "ZeroDivisionError")]
    assert "broken" in caplog.text


def test_a_check_may_find_nothing_to_say() -> None:
    assert run_checks([Check("calm", list, 5.0)], subject="a") == []
    assert run_checks([], subject="a") == []
