"""Machines with NVSwitches: their fabric manager must run, in the driver's version, or CUDA does not start."""

import re
from dataclasses import dataclass

from elastictrain.preflight.devices.gpu import GpuReport, subject
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

_verdict = Reporter("fabric_manager")

LIMIT_S = 5.0
SERVICE = "nvidia-fabricmanager"
_VERSION = re.compile(r"Fabric Manager version is\s*:?\s*(\d+(?:\.\d+){1,3})")
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+){1,3})\s")
_STATES = frozenset({"active", "inactive", "failed", "activating", "deactivating", "reloading"})
_UNJOINED = frozenset({"not started", "in progress"})


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """`service`: what systemd says of the fabric manager, None if it says nothing; `version`: that of the installed program."""

    service: str | None
    version: str | None
    driver: str | None


def read_fabric(surroundings: Surroundings, report: GpuReport | None) -> FabricFacts:
    """The state of the service, its version and the driver's."""
    state = surroundings.tools.run(("systemctl", "is-active", SERVICE), limit_s=LIMIT_S)
    version = surroundings.tools.run(("nv-fabricmanager", "--version"), limit_s=LIMIT_S)
    return FabricFacts(
        service=None if state is None or state.timed_out else parse_service(state.stdout),
        version=None if version is None or version.timed_out else parse_version(f"{version.stdout}\n{version.stderr}"),
        driver=(report.driver if report else None) or read_driver_version(surroundings),
    )


def read_driver_version(surroundings: Surroundings) -> str | None:
    """The version of the NVIDIA driver that the kernel has loaded."""
    found = _DRIVER.search((surroundings.read("/proc/driver/nvidia/version") or "") + " ")
    return found[1] if found else None


def parse_service(text: str) -> str | None:
    """The answer of `systemctl is-active`; None if it is no state of a service."""
    state = text.strip()
    return state if state in _STATES else None


def parse_version(text: str) -> str | None:
    """The answer of `nv-fabricmanager --version`."""
    found = _VERSION.search(text)
    return found[1] if found else None


def switched_fabric(report: GpuReport | None, *, num_switches: int) -> bool:
    """Whether NVSwitches join the GPUs: they are on the PCI bus, or the GPUs speak of a fabric (from Hopper on)."""
    return num_switches > 0 or bool(report and any(gpu.fabric_state for gpu in report.gpus))


def judge_fabric(facts: FabricFacts, report: GpuReport | None, *, switched: bool, host: str) -> list[Verdict]:
    """What GPUs themselves say of the fabric goes first: on rack-scale machines and in containers the service is elsewhere."""
    if not switched:
        return []
    gpus = report.gpus if report else ()
    found = []
    for gpu in gpus:
        state, status = gpu.fabric_state, gpu.fabric_status
        if state is None or (state.lower() == "completed" and (status is None or status.lower() == "success")):
            continue
        waiting = state.lower() in _UNJOINED
        found.append(Verdict(
            check="fabric_manager", scope=Scope.HOST, subject=subject(gpu, host),
            status=Status.FAIL if waiting or state.lower() == "completed" else Status.WARN,
            measured=f"{state}, {status}" if status else state, expected="Completed, Success",
            remedy=_remedy(facts) if waiting and facts.service != "active" else
            f"as root: systemctl restart {SERVICE}; then see journalctl -u {SERVICE} and dmesg | grep -e SXid -e Xid",
        ))  # fmt: skip
    if found:
        return found
    joined = bool(gpus) and all((gpu.fabric_state or "").lower() == "completed" for gpu in gpus)
    differs = facts.version is not None and facts.driver is not None and facts.version != facts.driver
    if not joined and facts.service not in {"active", None}:
        return [_verdict(host, Status.FAIL, str(facts.service), "active", _remedy(facts))]
    if differs:
        status = Status.WARN if joined or facts.service == "active" else Status.FAIL
        return [_verdict(host, status, f"version {facts.version}", f"version {facts.driver}, as the driver", _remedy(facts))]
    if joined or facts.service == "active":
        state = facts.service if facts.service == "active" else "GPUs have joined the fabric"
        return [_verdict(host, Status.PASS, f"{state}{', ' + facts.version if facts.version else ''}", "", "")]
    return [
        _verdict(
            host,
            Status.SKIP,
            "unknown",
            "active",
            f"ask the host itself, outside of any container: systemctl is-active {SERVICE}",
        )
    ]


def _remedy(facts: FabricFacts) -> str:
    if facts.driver is not None and facts.version != facts.driver:
        branch = facts.driver.partition(".")[0]
        package = SERVICE if int(branch) >= 580 else f"{SERVICE}-{branch}"
        return (
            f"as root: install {package} in exactly the driver's version {facts.driver}, then systemctl enable --now {SERVICE}"
        )
    return f"as root: systemctl enable --now {SERVICE}; if it does not stay up: journalctl -u {SERVICE}"
