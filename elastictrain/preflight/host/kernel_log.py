"""Driver errors in the kernel log since boot: Xids of GPUs, SXids of NVSwitches."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.preflight.host.gpu import GpuReport, bus_id
from elastictrain.preflight.verdict import Reporter, Status, Verdict
from elastictrain.surroundings import Surroundings

LIMIT_S = 5.0
# Tried in turn until one answers. Both need a right that containers and plain users often lack.
SOURCES = (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "cat"))
_RANGES = ((56, 58), (62, 65), (68, 77), (79, 86), (94, 105), (110, 120), (122, 125), (144, 150))
# Xids of hardware or its firmware, not of the program. Source: NVIDIA's Xid catalog; 140 is an unrecovered memory error,
# 144-150 are those of NVLink 5. Others (13, 31, 43, 45, ...) come from a faulty program.
HARDWARE = frozenset((48, 88, 89, 92, 140)).union(*(range(first, last + 1) for first, last in _RANGES))
UNFIT = {  # after these a GPU needs at least a reset
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
_AT = r"Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]{7,20})"
_XID = re.compile(rf"NVRM: {_AT}[^)\n]{{0,40}}\):\s*(?P<code>\d{{1,4}})\b[\s,]*(?P<words>[^\n]{{0,200}})")
_LEVEL = r"(?P<level>Non-fatal|Fatal)\s*,\s*(?P<words>[^\n]{0,120})"
_SXID = re.compile(rf"S{_AT}\):\s*(?P<code>\d{{1,6}}),\s*{_LEVEL}", re.I)


@dataclass(frozen=True, slots=True)
class Xid:
    """One error that a driver logged."""

    code: int
    bus: str
    words: str
    switch: bool = False  # of an NVSwitch
    fatal: bool = False  # as the NVSwitch reports


def read_kernel_log(surroundings: Surroundings) -> list[Xid] | None:
    """All errors that the kernel log still holds; None if it cannot be read."""
    for source in SOURCES:
        answer = surroundings.tools.run(source, limit_s=LIMIT_S)
        if answer is not None and not answer.timed_out and answer.returncode == 0 and answer.stdout.strip():
            return parse_kernel_log(answer.stdout)
    return None


def parse_kernel_log(text: str) -> list[Xid]:
    """Errors in a kernel log with any format of time stamps, in order."""
    found = []
    for line in text.splitlines():
        if match := _XID.search(line) or _SXID.search(line):
            fatal = match.groupdict().get("level")
            bus, words = bus_id(match["bus"]) or match["bus"], match["words"].strip()
            found.append(Xid(int(match["code"]), bus, words, fatal is not None, (fatal or "").lower() == "fatal"))
    return found


def judge_xids(xids: Sequence[Xid] | None, report: GpuReport | None, *, host: str) -> list[Verdict]:
    """One verdict for each GPU or switch with hardware errors since boot."""
    verdict = Reporter("xid", host)
    if xids is None:
        remedy = "let users read it, as root: sysctl kernel.dmesg_restrict=0 (or usermod -aG adm USER, for journalctl)"
        return [verdict.skipped("the kernel's log cannot be read", remedy=remedy)]
    found = []
    for bus in dict.fromkeys(xid.bus for xid in xids):
        if fatal := {xid.code: xid for xid in xids if xid.bus == bus and xid.switch and xid.fatal}:
            measured = f"fatal SXid {', '.join(f'{code} {xid.words}'.strip() for code, xid in fatal.items())}"
            remedy = "as root, GPUs idle: systemctl restart nvidia-fabricmanager, or reboot; if it comes back, replace the host"
            found.append(verdict(f"NVSwitch {bus} on {host}", Status.FAIL, measured, "none since boot", remedy))
        if counts := Counter(xid.code for xid in xids if xid.bus == bus and not xid.switch and xid.code in HARDWARE):
            gpu = next((gpu for gpu in report.gpus if gpu.bus == bus), None) if report else None
            status = Status.FAIL if counts.keys() & UNFIT.keys() else Status.WARN
            named = {code: f"{code} ({UNFIT[code]})" if code in UNFIT else f"{code}" for code in counts}
            texts = [named[code] + f", {count} times" * (count > 1) for code, count in counts.items()]
            about = f"GPU {gpu.index if gpu else bus} on {host}"
            found.append(verdict(about, status, f"Xid {'; '.join(texts)}", "none since boot", _remedy(set(counts), bus)))
    if found:
        return found
    others = sorted({xid.code for xid in xids if not xid.switch})
    return [verdict.passed(f"only of programs: {', '.join(map(str, others))}" if others else "none since boot")]


def _remedy(codes: set[int], bus: str) -> str:
    again = "if the GPU has been reset since, the log still shows it until the next boot: preflight.checks.xid=warn"
    reset = f"as root, with no process on any GPU: nvidia-smi --gpu-reset -i {bus} (or reboot)"
    if 79 in codes:
        return f"power-cycle the host (a warm reboot often does not bring GPU {bus} back), or replace it"
    if 64 in codes:
        return f"replace the host, or have GPU {bus} replaced: it has no spare memory left"
    if codes & {74, *range(144, 151)}:
        return f"see nvidia-smi nvlink -e, reseat a bridge if there is one, reboot; if it comes back replace the host. {again}"
    if codes & set(UNFIT):
        return f"{reset}; if it comes back replace the host. {again}"
    if 63 in codes:
        return f"{reset}, so that spare memory is used. {again}"
    return f"look: dmesg | grep 'Xid.*{bus[:-2]}'; https://docs.nvidia.com/deploy/xid-errors; reboot if it continues. {again}"
