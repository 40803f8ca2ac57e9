"""The checks of a host's devices. A tool is asked once, however many checks want its answer; without GPUs they are silent."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elastictrain.preflight.check import Check, Once
from elastictrain.preflight.devices import counters
from elastictrain.preflight.devices.amd import judge_xgmi, read_amd
from elastictrain.preflight.devices.gpu import GpuReport, Trouble, Vendor, judge_ecc, judge_row_remap, judge_throttle
from elastictrain.preflight.devices.kernel_log import judge_xids, read_kernel_log
from elastictrain.preflight.devices.nvidia import read_nvidia
from elastictrain.preflight.devices.nvlink import (
    Topology,
    judge_fabric,
    judge_nvlink,
    read_fabric,
    read_links,
    read_topology,
    switched_fabric,
)
from elastictrain.preflight.devices.pci import NVIDIA, gpu_lanes, judge_pcie, read_pci, read_port_lanes
from elastictrain.preflight.devices.visible import judge_visible, select
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Scope, Status, Verdict

LIMIT_S = 45.0
"""Two calls of a vendor's tool, each with its own limit, and some room: a check must outlast the tool that it waits for."""

_BOUND = "/proc/driver/nvidia/gpus"


class LocalDevices:
    """What is known of this host's devices, each question asked at most once. Safe for checks that run side by side."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.pci = Once(lambda: read_pci(surroundings))
        self._nvidia = Once(lambda: read_nvidia(surroundings))
        self._amd = Once(lambda: read_amd(surroundings))
        self.topology: Once[Topology | None] = Once(lambda: read_topology(surroundings))

    def report(self) -> GpuReport | None:
        """Facts of the GPUs: of NVIDIA's, or else of AMD's; None if there is no vendor's tool at all."""
        nvidia = self._nvidia()
        # Images often carry nvidia-smi on hosts that have AMD's GPUs, or none.
        absent = nvidia is None or nvidia.trouble in {Trouble.NO_DRIVER, Trouble.NO_DEVICES}
        if absent and not self.pci().gpus_of(NVIDIA):
            amd = self._amd()
            return amd[0] if amd is not None else nvidia
        return nvidia

    def used(self) -> GpuReport | None:
        """The same for those GPUs that the environment leaves to this process: an ill one that is hidden harms nobody."""
        report = self.report()
        if report is None:
            return None
        selection = select(report.gpus, self.surroundings.environment, report.vendor)
        return report if selection.mig_instances else replace(report, gpus=selection.gpus)

    def xgmi(self) -> Mapping[tuple[int, int], str]:
        """Kinds of links between AMD GPUs."""
        amd = self._amd()
        return amd[1] if amd is not None else {}


def device_checks(
    devices: LocalDevices,
    *,
    local_world_size: int | None,
    last_counters: Path,
    now: Callable[[], float] = time.time,
) -> list[Check]:
    """Checks of GPUs, of their links and of this host's ports.

    `local_world_size`: ranks on this host, None if unknown. `last_counters`: a file on this host that keeps port counters from
    one preflight to the next.
    """
    surroundings, host = devices.surroundings, devices.surroundings.host

    def gpus() -> list[Verdict]:
        return judge_visible(
            devices.report(),
            pci=devices.pci(),
            bound=surroundings.names(_BOUND),
            environment=surroundings.environment,
            local_world_size=local_world_size,
            host=host,
        )

    def of_report(judge: Callable[..., list[Verdict]]) -> Callable[[], list[Verdict]]:
        def run() -> list[Verdict]:
            report = devices.used()
            return judge(report, host=host) if report is not None else []

        return run

    def pcie() -> list[Verdict]:
        report = devices.used()
        lanes = [*(gpu_lanes(report, host) if report is not None else ()), *read_port_lanes(surroundings)]
        return judge_pcie(lanes, host=host)

    def port_counters() -> list[Verdict]:
        return _check_counters(surroundings, last_counters, now=now())

    return [
        Check("gpus", gpus, LIMIT_S),
        Check("fabric_manager", lambda: _check_fabric(devices), LIMIT_S),
        Check("ecc", of_report(judge_ecc), LIMIT_S),
        Check("row_remap", of_report(judge_row_remap), LIMIT_S),
        Check("xid", lambda: _check_xids(devices), LIMIT_S),
        Check("throttle", of_report(judge_throttle), LIMIT_S),
        Check("pcie", pcie, LIMIT_S),
        Check("nvlink", lambda: _check_links(devices), 2 * LIMIT_S, quick=False),
        Check("counters", port_counters, 10.0),
    ]


def _check_fabric(devices: LocalDevices) -> list[Verdict]:
    report = devices.report()
    switched = switched_fabric(report, num_switches=devices.pci().switches)
    if not switched:
        return []
    return judge_fabric(read_fabric(devices.surroundings, report), report, switched=switched, host=devices.surroundings.host)


def _check_xids(devices: LocalDevices) -> list[Verdict]:
    report = devices.report()
    theirs = devices.pci().gpus_of(NVIDIA) or (
        report is not None and report.vendor is Vendor.NVIDIA and (report.gpus or report.lost)
    )
    if not theirs:
        return []
    xids = read_kernel_log(devices.surroundings)
    if xids is not None and report is not None:
        used = devices.used()
        hidden = {gpu.bus for gpu in report.gpus} - {gpu.bus for gpu in (used.gpus if used else ())}
        xids = [xid for xid in xids if xid.bus not in hidden]
    return judge_xids(xids, report, host=devices.surroundings.host)


def _check_links(devices: LocalDevices) -> list[Verdict]:
    report, host = devices.used(), devices.surroundings.host
    if report is None or len(report.gpus) < 2:
        return []
    if report.vendor is Vendor.AMD:
        return judge_xgmi(devices.xgmi(), host=host)
    links = read_links(devices.surroundings)
    used = {gpu.index for gpu in report.gpus}
    return judge_nvlink(
        None if links is None else [one for one in links if one.index in used],
        devices.topology(),
        switched=switched_fabric(report, num_switches=devices.pci().switches),
        mig=all(gpu.mig for gpu in report.gpus),
        num_gpus=len(report.gpus),
        host=host,
    )


def _check_counters(surroundings: Surroundings, path: Path, *, now: float) -> list[Verdict]:
    before = counters.load(path)
    after = counters.read_counters(surroundings, now=now)
    verdicts = counters.judge_counters(counters.growth(before, after), host=surroundings.host, num_ports=len(after.ports))
    if after.ports:
        try:
            counters.store(path, after)
        except OSError as error:
            remedy = f"make {path.parent} writable, or keep the counters elsewhere"
            verdicts.append(Verdict(
                check="counters", scope=Scope.HOST, subject=surroundings.host, status=Status.WARN,
                measured=f"cannot be written down: {error}", expected=f"{path} written", remedy=remedy,
            ))  # fmt: skip
    return verdicts
