"""Verdicts and settings for tests."""

from typing import Any

from elastictrain.config.preflight import PreflightChecks, PreflightGroup
from elastictrain.preflight.verdict import Figure, Scope, Status, Verdict

OF_DEVICES = {"gpus", "fabric_manager", "ecc", "row_remap", "xid", "throttle", "pcie", "nvlink", "counters"}
"""The checks of GPUs, of their links and of this host's ports."""

OF_GROUPS = {"present", "collectives", "bus_bandwidth", "p2p", "matmul", "sdc", "rails", "nccl_transport"}
"""The checks of a group of ranks."""


def link(source: str, target: str) -> str:
    """The subject of a verdict about one direction between two hosts."""
    return f"{source} -> {target}"


def verdict(
    status: str = "pass",
    *,
    check: str = "mtu",
    subject: str = "a",
    scope: str = "host",
    measured: Figure = None,
    expected: Figure = None,
    unit: str = "",
) -> Verdict:
    return Verdict(
        check=check,
        scope=Scope(scope),
        subject=subject,
        status=Status(status),
        measured=measured,
        expected=expected,
        unit=unit,
        remedy="" if status == "pass" else f"mend {check} of {subject}",
    )


def settings(**modes: Any) -> PreflightGroup:
    """Those of a run in which some checks have another mode than "fail"."""
    return PreflightGroup(checks=PreflightChecks(**modes))


def gpu(which: int | str) -> str:
    """The subject of a verdict about one GPU of h1."""
    return f"GPU {which} on h1"


def gpu_pair(one: int, other: int) -> str:
    """About a pair of them."""
    return f"GPU {one} -> {gpu(other)}"


def port(name: str) -> str:
    """About a network port of h1."""
    return f"{name} on h1"


def rank(number: int, host: str) -> str:
    """About one rank."""
    return f"rank {number} on {host}"
