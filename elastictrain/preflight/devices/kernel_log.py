"""What drivers wrote into the kernel's log since the host was booted: Xids of GPUs, SXids of NVSwitches."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.preflight.devices.gpu import GpuReport, subject
from elastictrain.preflight.devices.words import bus_id
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Scope, Status, Verdict

LIMIT_S = 5.0
SOURCES = (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "cat"))
"""Asked in turn until one answers. Both need a right that containers and plain users often lack."""


def _codes(*spans: int | tuple[int, int]) -> frozenset[int]:
    return frozenset(
        code for span in spans for code in (range(span[0], span[1] + 1) if isinstance(span, tuple) else (span,))
    )  # fmt: skip


HARDWARE = _codes(48, (56, 58), (62, 65), (68, 77), (79, 86), 88, 89, 92, (94, 105), (110, 120), (122, 125), 140, (144, 150))
"""Xids that mean hardware or its firmware, not the program. Source: NVIDIA's Xid catalog; 140 is an unrecovered memory error,
144-150 are those of NVLink 5. Others (13, 31, 43, 45, ...) are what a faulty program does."""

UNFIT = {
    48: "uncorrected memory error",
    62: "the GPU's own controller halted",
    64: "bad memory could not be replaced",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "memory error that was not contained",
    110: "security fault",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware failed",
    140: "memory error without recovery",
}
"""Those after which a GPU is of no use before a reset at least."""

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]{7,20})[^)\n]{0,40}\):\s*(?P<code>\d{1,4})\b[\s,]*(?P<words>[^\n]{0,200})"
)
_SXID = re.compile(
    r"SXid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]{7,20})\):\s*(?P<code>\d{1,6}),\s*(?P<level>Non-fatal|Fatal)\s*,\s*"
    r"(?P<words>[^\n]{0,120})",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Xid:
    """One complaint of a driver. `switch`: by an NVSwitch, which says itself whether it is fatal."""

    code: int
    bus: str
    words: str
    switch: bool = False
    fatal: bool = False


def read_kernel_log(surroundings: Surroundings) -> list[Xid] | None:
    """All complaints that the kernel's log still holds; None if the log cannot be read."""
    for source in SOURCES:
        answer = surroundings.tools.run(source, limit_s=LIMIT_S)
        if answer is not None and not answer.timed_out and answer.returncode == 0 and answer.stdout.strip():
            return parse_kernel_log(answer.stdout)
    return None


def parse_kernel_log(text: str) -> list[Xid]:
    """Complaints in a kernel log of any format of time stamps, in the order of their coming."""
    found = []
    for line in text.splitlines():
        if match := _XID.search(line):
            found.append(Xid(int(match["code"]), bus_id(match["bus"]) or match["bus"], match["words"].strip()))
        elif match := _SXID.search(line):
            fatal = match["level"].lower() == "fatal"
            bus = bus_id(match["bus"]) or match["bus"]
            found.append(Xid(int(match["code"]), bus, match["words"].strip(), switch=True, fatal=fatal))
    return found


def judge_xids(xids: Sequence[Xid] | None, report: GpuReport | None, *, host: str) -> list[Verdict]:
    """One verdict for each GPU or switch that had trouble with its hardware since boot."""
    if xids is None:
        remedy = (
            "let users read the kernel's log, as root: sysctl kernel.dmesg_restrict=0 (or usermod -aG adm USER, for journalctl)"
        )
        return [Verdict(
            check="xid", scope=Scope.HOST, subject=host, status=Status.SKIP,
            measured="the kernel's log cannot be read", expected="a kernel log", remedy=remedy,
        )]  # fmt: skip
    found = []
    for bus in dict.fromkeys(xid.bus for xid in xids):
        switch = [xid for xid in xids if xid.bus == bus and xid.switch and xid.fatal]
        if switch:
            found.append(_judge_switch(bus, switch, host))
        hardware = [xid for xid in xids if xid.bus == bus and not xid.switch and xid.code in HARDWARE]
        if hardware:
            found.append(_judge_gpu(bus, hardware, report, host))
    if found:
        return found
    others = sorted({xid.code for xid in xids if not xid.switch})
    measured = f"only of programs: {', '.join(map(str, others))}" if others else "none since boot"
    return [Verdict(check="xid", scope=Scope.HOST, subject=host, status=Status.PASS, measured=measured)]


def _judge_gpu(bus: str, xids: Sequence[Xid], report: GpuReport | None, host: str) -> Verdict:
    counts = Counter(xid.code for xid in xids)
    codes = set(counts)
    gpu = report.of_bus(bus) if report else None
    parts = [
        f"{code}" + (f" ({UNFIT[code]})" if code in UNFIT else "") + f", {count} times" * (count > 1)
        for code, count in counts.items()
    ]
    return Verdict(
        check="xid",
        scope=Scope.HOST,
        subject=subject(gpu, host) if gpu else f"GPU {bus} on {host}",
        status=Status.FAIL if codes & set(UNFIT) else Status.WARN,
        measured=f"Xid {'; '.join(parts)}",
        expected="none since boot",
        remedy=_remedy(codes, bus),
    )


def _remedy(codes: set[int], bus: str) -> str:
    again = "if the GPU has been reset since, the log still shows it until the next boot: preflight.checks.xid=warn"
    reset = f"as root, with no process on any GPU: nvidia-smi --gpu-reset -i {bus} (or reboot)"
    if 79 in codes:
        return f"power-cycle the host (a warm reboot often does not bring GPU {bus} back), or replace it"
    if 64 in codes:
        return f"replace the host, or have GPU {bus} replaced: it has no spare memory left"
    if codes & {74, *range(144, 151)}:
        return (
            f"look at nvidia-smi nvlink -e, reseat a bridge if there is one, reboot; if it comes back replace the host. {again}"
        )
    if codes & set(UNFIT):
        return f"{reset}; if it comes back replace the host. {again}"
    if 63 in codes:
        return f"{reset}, so that spare memory is used. {again}"
    return f"look: dmesg | grep 'Xid.*{bus[:-2]}'; https://docs.nvidia.com/deploy/xid-errors; reboot if it goes on. {again}"


def _judge_switch(bus: str, xids: Sequence[Xid], host: str) -> Verdict:
    codes = ", ".join(f"{xid.code} {xid.words}".strip() for xid in {xid.code: xid for xid in xids}.values())
    return Verdict(
        check="xid",
        scope=Scope.HOST,
        subject=f"NVSwitch {bus} on {host}",
        status=Status.FAIL,
        measured=f"fatal SXid {codes}",
        expected="none since boot",
        remedy="as root, GPUs idle: systemctl restart nvidia-fabricmanager, or reboot; if it comes back, replace the host",
    )
