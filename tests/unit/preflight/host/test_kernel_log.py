from collections.abc import Callable

import pytest

from elastictrain.preflight.host.gpu import Gpu, GpuReport, Vendor
from elastictrain.preflight.host.kernel_log import HARDWARE, UNFIT, judge_xids, parse_kernel_log, read_kernel_log
from elastictrain.preflight.verdict import Status
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.preflight.made import gpu

Recorded = Callable[[str], str]
REPORT = GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=(Gpu(index=5, bus="0000:3b:00.0"),))


def test_formats_new_and_old(recorded: Recorded) -> None:
    xids = parse_kernel_log(recorded("dmesg_xids.txt"))
    assert [(xid.code, xid.bus, xid.switch, xid.fatal) for xid in xids] == [
        (31, "0000:1b:00.0", False, False),
        (79, "0000:3b:00.0", False, False),
        (63, "0000:43:00.0", False, False),
        (94, "0000:43:00.0", False, False),
        (12028, "0000:05:00.0", True, False),
        (20034, "0000:c3:00.0", True, True),
    ]
    assert [(xid.code, xid.bus) for xid in parse_kernel_log(recorded("syslog_xids_old.txt"))] == [
        (13, "0000:03:00.0"),
        (48, "0000:af:00.0"),
    ]
    assert [(xid.code, xid.bus) for xid in parse_kernel_log(recorded("journal_xids.txt"))] == [
        (119, "0000:9b:00.0"),
        (119, "0000:9b:00.0"),
        (94, "0002:00:03.0"),
    ]


def test_hardware_is_told_from_programs(recorded: Recorded) -> None:
    lost, remapped, switch = judge_xids(parse_kernel_log(recorded("dmesg_xids.txt")), REPORT, host="h1")
    assert (lost.status, lost.subject, lost.measured) == (Status.FAIL, gpu(5), f"Xid 79 ({UNFIT[79]})")
    assert "power-cycle" in lost.remedy
    assert (remapped.status, remapped.subject) == (Status.WARN, gpu("0000:43:00.0"))
    assert all(code in str(remapped.measured) for code in ("63", "94"))
    assert all(word in remapped.remedy for word in ("--gpu-reset", "0000:43:00.0"))
    assert (switch.status, switch.subject.split()[1]) == (Status.FAIL, "0000:c3:00.0")


def test_repetitions_are_counted(recorded: Recorded) -> None:
    found = judge_xids(parse_kernel_log(recorded("journal_xids.txt")), None, host="h1")
    assert found[0].measured == f"Xid 119 ({UNFIT[119]}), 2 times"
    assert [verdict.status for verdict in found] == [Status.FAIL, Status.WARN]


def test_only_programs_at_fault() -> None:
    (found,) = judge_xids(
        parse_kernel_log("NVRM: Xid (PCI:0000:1b:00): 31, pid=1\nNVRM: Xid (PCI:0000:1b:00): 43, pid=1\n"), None, host="h1"
    )
    assert (found.status, str(found.measured).partition(": ")[2]) == (Status.PASS, "31, 43")


@pytest.mark.parametrize("code", [48, 62, 64, 74, 79, 95, 110, 119, 120, 140, 63, 92, 145])
def test_every_hardware_xid_has_a_remedy(code: int) -> None:
    (found,) = judge_xids(parse_kernel_log(f"NVRM: Xid (PCI:0000:1b:00): {code}, x"), None, host="h1")
    assert found.status is (Status.FAIL if code in UNFIT else Status.WARN)
    assert found.remedy


def test_the_list_of_hardware_xids() -> None:
    assert set(UNFIT) <= HARDWARE
    assert not HARDWARE & {8, 13, 31, 43, 45, 59, 66, 78, 87, 93, 109}


def test_the_log_is_read_where_it_can_be(host: Callable[..., Surroundings], recorded: Recorded) -> None:
    refused = ToolOutput(1, "", "dmesg: read kernel buffer failed: Operation not permitted")
    good = ToolOutput(0, recorded("journal_xids.txt"), "")
    assert len(read_kernel_log(host(tools={"dmesg": refused, "journalctl": good})) or []) == 3
    assert read_kernel_log(host(tools={"dmesg": ToolOutput(0, recorded("dmesg_clean.txt"), "")})) == []
    partial = ToolOutput(1, recorded("dmesg_clean.txt"), "dmesg: read kernel buffer failed")
    assert len(read_kernel_log(host(tools={"dmesg": partial, "journalctl": good})) or []) == 3
    empty = ToolOutput(0, "", "No journal files were opened due to insufficient permissions.")
    assert read_kernel_log(host(tools={"dmesg": refused, "journalctl": empty})) is None
    assert read_kernel_log(host()) is None


def test_a_log_that_cannot_be_read_is_no_clean_log() -> None:
    (found,) = judge_xids(None, None, host="h1")
    assert found.status is Status.SKIP
    assert "kernel.dmesg_restrict=0" in found.remedy
    assert judge_xids([], None, host="h1")[0].status is Status.PASS
