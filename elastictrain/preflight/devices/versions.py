"""Versions that must be the same on all hosts. Facts only: hosts are compared elsewhere."""

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from elastictrain.preflight.devices.fabric import read_driver_version
from elastictrain.preflight.devices.gpu import GpuReport, counted_names
from elastictrain.preflight.surroundings import Surroundings

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
"""What torch's wheels bring NCCL in; a torch built otherwise has it inside, and is told apart by its own version."""


def installed_version(package: str) -> str | None:
    """The version of an installed Python package, found without importing it; None if it is not installed."""
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):
        return None


def read_versions(
    surroundings: Surroundings, report: GpuReport | None, *, installed: Callable[[str], str | None] = installed_version
) -> Mapping[str, str | None]:
    """By name: `driver`, `cuda` (the newest that it serves), `torch`, `nccl`, `python`, `gpus`; None: unknown, or not there."""
    return {
        "driver": (report.driver if report else None) or read_driver_version(surroundings),
        "cuda": report.runtime if report else None,
        "torch": installed("torch"),
        "nccl": next((found for package in NCCL_PACKAGES if (found := installed(package))), None),
        "python": platform.python_version(),
        "gpus": counted_names(report) if report and report.gpus else None,
    }
