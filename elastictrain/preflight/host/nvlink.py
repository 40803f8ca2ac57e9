"""NVLinks of the GPUs, and the manager of the fabric that joins them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastictrain.preflight.host.gpu import GpuReport, decimal
from elastictrain.preflight.verdict import Reporter, Status, Verdict
from elastictrain.surroundings import Surroundings

SERVICE_LIMIT_S = 5.0
SERVICE = "nvidia-fabricmanager"

SLOW_LINK = 0.9  # share of the usual speed on this host, whose links are all alike; a slower link has trained badly
_VERSION = re.compile(r"Fabric Manager version is\s*:?\s*(\d+(?:\.\d+){1,3})")
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+){1,3})\s")
_STATES = frozenset({"active", "inactive", "failed", "activating", "deactivating", "reloading"})
_GPU = re.compile(r"\s*GPU (\d{1,3}):")
_LINK = re.compile(r"\s*Link (\d{1,3}):\s*(.*)")
_ERRORS = re.compile(r"\s*Link \d{1,3}: (Replay|Recovery|CRC) Errors: (\d{1,18})\s*$")


def switched_fabric(report: GpuReport | None, *, num_switches: int) -> bool:
    """Whether NVSwitches join the GPUs: they are on the PCI bus, or the GPUs report a fabric (from Hopper on)."""
    return num_switches > 0 or bool(report and any(gpu.fabric_state for gpu in report.gpus))


def check_fabric(surroundings: Surroundings, report: GpuReport | None, *, num_switches: int) -> list[Verdict]:
    """Check `fabric_manager`. The GPUs' own fabric state comes first: in racks and containers the service runs elsewhere."""
    if not switched_fabric(report, num_switches=num_switches):
        return []
    host, gpus = surroundings.host, report.gpus if report else ()
    verdict = Reporter("fabric_manager", host)
    told = surroundings.ask("systemctl", "is-active", SERVICE, limit_s=SERVICE_LIMIT_S).partition("\n")[0]
    service = told if told in _STATES else None
    installed = _VERSION.search(surroundings.ask("nv-fabricmanager", "--version", limit_s=SERVICE_LIMIT_S))
    version = installed[1] if installed else None
    loaded = _DRIVER.search((surroundings.read("/proc/driver/nvidia/version") or "") + " ")
    driver = (report.driver if report else None) or (loaded[1] if loaded else None)
    starting = f"as root: systemctl enable --now {SERVICE}; if it does not stay up: journalctl -u {SERVICE}"
    if driver is not None and version != driver:
        branch = driver.partition(".")[0]
        package = SERVICE if int(branch) >= 580 else f"{SERVICE}-{branch}"
        starting = f"as root: install {package} in exactly the driver's version {driver}, then systemctl enable --now {SERVICE}"
    active = service == "active"
    found = []
    for gpu in gpus:
        state, status = (gpu.fabric_state or "").lower(), (gpu.fabric_status or "success").lower()
        if not state or (state == "completed" and status == "success"):
            continue
        waiting = state in ("not started", "in progress")
        remedy = f"as root: systemctl restart {SERVICE}; then see journalctl -u {SERVICE} and dmesg | grep -e SXid -e Xid"
        measured = ", ".join(filter(None, [gpu.fabric_state, gpu.fabric_status]))
        worst = Status.FAIL if waiting or state == "completed" else Status.WARN
        remedy = starting if waiting and not active else remedy
        found.append(verdict(f"GPU {gpu.index} on {host}", worst, measured, "Completed, Success", remedy))
    if found:
        return found
    joined = bool(gpus) and all((gpu.fabric_state or "").lower() == "completed" for gpu in gpus)
    if not joined and not active and service is not None:
        return [verdict.failed(service, expected="active", remedy=starting)]
    if version is not None and driver is not None and version != driver:
        fatal, expected = not (joined or active), f"version {driver}, as the driver"
        return [verdict.failed(f"version {version}", fatal=fatal, expected=expected, remedy=starting)]
    if joined or active:
        state = "active" if active else "GPUs have joined the fabric"
        return [verdict.passed(f"{state}{', ' + version if version else ''}")]
    return [verdict.skipped("unknown", remedy=f"ask the host itself, outside of any container: systemctl is-active {SERVICE}")]


@dataclass(slots=True)
class GpuLinks:
    index: int
    speeds_gbs: dict[int, float] = field(default_factory=dict)  # GB/s per direction, of links that are up, by number
    down: tuple[int, ...] = ()  # numbers of the others
    all_down: bool = False  # the driver reports all links inactive: no bridge, no fabric, or all broken


def parse_links(text: str) -> list[GpuLinks]:
    """NVLinks by GPU. A link whose state is neither a speed nor inactive is left out."""
    found: list[GpuLinks] = []
    for line in text.splitlines():
        if header := _GPU.match(line):
            found.append(GpuLinks(int(header[1])))
        elif found and (link := _LINK.match(line)):
            number, state = int(link[1]), link[2].strip()
            speed = decimal(state) if state.endswith("GB/s") else None
            if speed:
                found[-1].speeds_gbs[number] = speed
            elif "inactive" in state.lower():
                found[-1].down += (number,)
        elif found and "all links are inactive" in line.lower():
            found[-1].all_down = True
    return found


def parse_errors(text: str) -> dict[int, dict[str, int]]:
    """By GPU, the errors of all its NVLinks together: `nvlink_replay`, `nvlink_recovery`, `nvlink_crc`."""
    found: dict[int, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if header := _GPU.match(line):
            counts = found.setdefault(int(header[1]), {})
        elif error := _ERRORS.match(line):
            name = f"nvlink_{error[1].lower()}"
            counts[name] = counts.get(name, 0) + int(error[2])
    return found


def judge_nvlink(links: Sequence[GpuLinks], *, switched: bool, mig: bool, num_gpus: int, host: str) -> list[Verdict]:
    """Links that are down or slow. With NVSwitches all must be up; bridges may join only some GPUs, and fewer are a warning."""
    verdict = Reporter("nvlink", host)
    if mig:
        return [verdict.skipped("MIG is on", remedy="none: GPUs that are divided by MIG do not use NVLink")]
    if not links:
        return [verdict.skipped("unknown", remedy="look yourself: nvidia-smi nvlink --status")]
    most = max((len(one.speeds_gbs) for one in links), default=0)
    speeds = Counter(speed for one in links for speed in one.speeds_gbs.values())
    usual = speeds.most_common(1)[0][0] if speeds else 0.0
    # Some models have fewer links than their chip: then the same number is down on every GPU, and that is no failure.
    alike = len({len(one.down) for one in links}) == 1
    found = []
    for one in links:
        active, about = len(one.speeds_gbs), f"GPU {one.index} on {host}"
        measured = f"{active} links up{', down: ' if one.down else ''}{', '.join(map(str, sorted(one.down)))}"
        if switched and (one.all_down or one.down):
            restart = f"as root, with all GPUs idle: systemctl restart {SERVICE}, or reboot"
            remedy = f"see dmesg | grep -e Xid -e SXid; {restart}; if GPU {one.index} still misses links, replace the host"
            expected = f"{max(most, active + len(one.down)) or 'all'} links up"
            worst = Status.WARN if alike and not one.all_down else Status.FAIL
            found.append(verdict(about, worst, measured, expected, remedy))
        elif not switched and one.down and 0 < active < most:
            remedy = f"check its NVLink bridge: nvidia-smi nvlink --status -i {one.index}; reseat it, or reboot"
            found.append(verdict(about, Status.WARN, measured, f"{most} links up, as on other GPUs", remedy))
        if slow := {number: speed for number, speed in sorted(one.speeds_gbs.items()) if speed < SLOW_LINK * usual}:
            measured = f"link {', '.join(map(str, slow))}: {min(slow.values()):g}"
            look = f"nvidia-smi nvlink -e -i {one.index}"
            remedy = f"look for retraining and errors: {look}; reboot, and replace the host if it stays"
            found.append(verdict(about, Status.WARN, measured, usual, remedy, unit="GB/s"))
    total = max((len(one.speeds_gbs) + len(one.down) for one in links), default=0)
    whole = [one for one in links if one.all_down or len(one.speeds_gbs) + len(one.down) == (total or 1)]
    if len(whole) < num_gpus and (switched or most):
        measured, remedy = f"{len(whole)} GPUs told all their links", "look yourself: nvidia-smi nvlink --status"
        found.append(verdict.warned(measured, expected=f"{num_gpus} GPUs", remedy=remedy))
    return found or [verdict.passed(f"{most} links at {usual:g} GB/s" if most else "no NVLink in use")]
