"""What a host can be asked without any other: its own checks, and the ones of its devices and interfaces. No torch.

Checks run side by side, each under a deadline, so that none can hang a start.
"""

import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import psutil

from elastictrain.config.preflight import PreflightGroup
from elastictrain.distributed.bounded import each_within, within
from elastictrain.preflight.host import names, resources, storage_trip
from elastictrain.preflight.host.amd import judge_xgmi, read_amd
from elastictrain.preflight.host.cgroup import read_allowance, read_mounts
from elastictrain.preflight.host.counters import check_counters
from elastictrain.preflight.host.disk import folders_of, judge_disk, judge_shared_memory, read_space
from elastictrain.preflight.host.gpu import GpuReport, Trouble, Vendor, judge_ecc, judge_row_remap, judge_throttle
from elastictrain.preflight.host.kernel_log import judge_xids, read_kernel_log
from elastictrain.preflight.host.nvidia import read_nvidia
from elastictrain.preflight.host.nvlink import check_fabric, judge_nvlink, parse_links, parse_topology, switched_fabric
from elastictrain.preflight.host.visible import judge_pcie, judge_visible, read_lanes, read_pci, select
from elastictrain.preflight.policy import Level, apply_modes
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.infiniband import Rdma, kinds_here, read_devices
from elastictrain.preflight.transport.judge import judge_infiniband, judge_interface
from elastictrain.preflight.transport.plan import read_facts
from elastictrain.preflight.transport.settings import read_settings
from elastictrain.preflight.verdict import Reporter, Verdict

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FILES_LIMIT_S = 3.0
"""For what only reads files of the kernel; a dead file server is what can make it longer."""

_MARGIN_S = 1.0
"""A check that limits its own waiting should say itself what it waited for."""

_TOOLS_LIMIT_S = 45.0
"""Two calls of a vendor's tool, each with its own limit, and some room: a check must outlast the tool that it waits for."""

_LINKS_LIMIT_S = 20.0
_TRANSPORT_LIMIT_S = 5.0
_RDMA_LIMIT_S = 2.0


class Once(Generic[T]):
    """Asks when first called; every later caller, from any thread, gets the same answer. If asking breaks, all hear of it."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: list[T] = []

    def __call__(self) -> T:
        # Checks run side by side: whoever comes second waits here for the tool instead of starting it again.
        with self._lock:
            if not self._answers:
                self._answers.append(self._ask())
            return self._answers[0]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one host. `run` returns what it found: one verdict or several, in any scope.

    After `limit_s` there is no answer. `quick`: whether it is part of a quick preflight, too.
    """

    name: str
    run: Callable[[], Verdict | Sequence[Verdict]]
    limit_s: float
    quick: bool = True


def run_checks(checks: Sequence[Check], *, subject: str) -> list[Verdict]:
    """What all checks found, in their order; each runs in a thread of its own. Never raises, and never takes longer than the
    longest limit: what has not answered by then, or broke, is a failure that says so."""
    answers = each_within([(check.limit_s, partial(_run, check, subject=subject)) for check in checks])
    found: list[Verdict] = []
    for check, verdicts in zip(checks, answers, strict=True):
        found += [_no_answer(check, subject)] if verdicts is None else verdicts
    return found


def _run(check: Check, *, subject: str) -> Sequence[Verdict]:
    began = time.monotonic()
    try:
        found = check.run()
        verdicts = [found] if isinstance(found, Verdict) else list(found)
    except Exception as error:
        # The edge of a thread. A check that breaks knows nothing about its subject, and that must be seen.
        logger.exception("check %s broke", check.name)
        remedy = f"report it as a bug; to go on without this check: preflight.checks.{check.name}=off"
        measured = f"{type(error).__name__}: {error}"
        verdicts = [Reporter(check.name, subject).failed(measured, expected="an answer", remedy=remedy)]
    seconds = time.monotonic() - began
    if seconds > check.limit_s:
        return [_no_answer(check, subject)]
    return [replace(verdict, seconds=round(seconds, 4)) for verdict in verdicts]


def _no_answer(check: Check, subject: str) -> Verdict:
    report = Reporter(check.name, subject, seconds=check.limit_s)
    remedy = f"look at what the check waits for on {subject}; to go on without it: preflight.checks.{check.name}=off"
    return report.failed(f"no answer in {check.limit_s:g} s", expected="an answer", remedy=remedy, may_pass=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChecks:
    """What is asked of this host, and what a run wants of it; None where nobody knows.

    `cpus`: that its ranks keep busy (ranks x threads). `towards`: an address of another host (the rendezvous); it
    tells the own address. `ports_free`: whether `preflight.ports` must be free, because nothing of the run listens there yet.
    """

    level: Level
    settings: PreflightGroup = field(default_factory=PreflightGroup)
    local_world_size: int | None = 1
    run_dir: str | None = None
    memory_dir: str = "/dev/shm"  # noqa: S108
    cpus: float | None = None
    several_hosts: bool = False
    towards: str | None = None
    ports_free: bool = False

    @property
    def modes(self) -> dict[str, str]:
        """By check: fail, warn or off."""
        return asdict(self.settings.checks)


def check_host(surroundings: Surroundings, asked: OwnChecks, *, more: Sequence[Check] = ()) -> list[Verdict]:
    """All checks of this host by itself, and `more`, side by side; never raises."""
    # A person's settings may lie in a home folder whose server is dead.
    uses_rdma = within(_RDMA_LIMIT_S, lambda: _uses_rdma(surroundings)) or False
    checks = [*host_checks(surroundings, asked, rdma=uses_rdma), *device_checks(surroundings, asked), *more]
    modes, full = asked.modes, asked.level is Level.FULL
    chosen = [check for check in checks if modes.get(check.name) != "off" and (check.quick or full)]
    return apply_modes(run_checks(chosen, subject=surroundings.host), modes)


def _uses_rdma(surroundings: Surroundings) -> bool:
    kinds = kinds_here(read_devices(surroundings), settings=read_settings(surroundings))
    return bool(kinds - {Rdma.NONE, Rdma.UNKNOWN})


def transport_checks(surroundings: Surroundings) -> list[Check]:
    """Of a host that knows nothing of others: how it would choose its interfaces, and what is wrong with its ports."""
    facts = Once(lambda: read_facts(surroundings, rendezvous=None, alone=True))
    return [
        Check("interface", lambda: judge_interface(facts()), _TRANSPORT_LIMIT_S),
        Check("infiniband", lambda: judge_infiniband(facts()), _TRANSPORT_LIMIT_S),
    ]


def host_checks(surroundings: Surroundings, asked: OwnChecks, *, rdma: bool = False) -> list[Check]:
    """On a healthy host all of them, side by side, take well under a second, and only `storage` takes longer where a client of
    an object store must be loaded. `rdma`: whether this host has InfiniBand, RoCE or EFA that will be used."""
    host, environment = surroundings.host, surroundings.environment
    allowance = Once(lambda: read_allowance(surroundings))
    capabilities = Once(lambda: resources.read_capabilities(surroundings))
    known_names = Once(lambda: names.read_names(surroundings, towards=asked.towards))
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted_ports = asked.settings.ports if asked.ports_free else ()
    storage_s = asked.settings.limits.storage_s

    def storage() -> Verdict:
        trip = storage_trip.read_trip(surroundings, url=asked.run_dir, limit_s=storage_s) if asked.run_dir else None
        return storage_trip.judge_trip(trip, host=host, environment=environment)

    def disk() -> list[Verdict]:
        mounts, folders = read_mounts(surroundings), folders_of(asked.run_dir, environment=environment)
        return [judge_disk(folder, read_space(folder.path, mounts=mounts), host=host) for folder in folders]

    def shared_memory() -> Verdict:
        space = read_space(asked.memory_dir, mounts=read_mounts(surroundings))
        return judge_shared_memory(asked.memory_dir, space, host=host)

    def memory() -> Verdict:
        found, group = psutil.virtual_memory(), allowance().memory
        swapped = psutil.swap_memory().used
        return resources.judge_memory(total=found.total, available=found.available, swapped=swapped, group=group, host=host)

    def memlock() -> Verdict:
        limit = resources.read_limit(resource.RLIMIT_MEMLOCK)
        return resources.judge_memlock(limit, capabilities=capabilities(), host=host, rdma=rdma)

    def processes() -> Verdict:
        limit, group = resources.read_limit(resource.RLIMIT_NPROC), allowance().processes
        return resources.judge_processes(limit, group, capabilities=capabilities(), host=host)

    def open_files() -> Verdict:
        return resources.judge_open_files(resources.read_limit(resource.RLIMIT_NOFILE), host=host)

    def load() -> Verdict:
        return resources.judge_load(round(os.getloadavg()[0], 2), cpus=psutil.cpu_count() or visible, host=host)

    return [
        Check("name", lambda: names.judge_name(known_names(), several_hosts=asked.several_hosts), names.LIMIT_S + _MARGIN_S),
        Check("lookup", lambda: names.judge_lookups(known_names(), host=host), names.LIMIT_S + _MARGIN_S),
        Check("ports", lambda: [names.check_port(port, host=host) for port in wanted_ports], _FILES_LIMIT_S),
        Check("storage", storage, storage_s + _MARGIN_S),
        Check("disk", disk, _FILES_LIMIT_S),
        Check("shared_memory", shared_memory, _FILES_LIMIT_S),
        Check("memory", memory, _FILES_LIMIT_S),
        Check("memlock", memlock, _FILES_LIMIT_S),
        Check("open_files", open_files, _FILES_LIMIT_S),
        Check("processes", processes, _FILES_LIMIT_S),
        Check("cpu", lambda: resources.judge_cpu(allowance(), visible=visible, needed=asked.cpus, host=host), _FILES_LIMIT_S),
        Check("load", load, _FILES_LIMIT_S),
    ]


class LocalDevices:
    """What is known of this host's devices, each question asked at most once. Safe for checks that run side by side."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._environment = surroundings.environment
        self.pci = Once(lambda: read_pci(surroundings))
        self._nvidia = Once(lambda: read_nvidia(surroundings))
        self.amd = Once(lambda: read_amd(surroundings))

    def report(self) -> GpuReport | None:
        """Facts of the GPUs: of NVIDIA's, or else of AMD's; None if there is no vendor's tool at all."""
        nvidia = self._nvidia()
        # Images often carry nvidia-smi on hosts that have AMD's GPUs, or none.
        absent = nvidia is None or nvidia.trouble in {Trouble.NO_DRIVER, Trouble.NO_DEVICES}
        if absent and not self.pci().nvidia and (amd := self.amd()) is not None:
            return amd[0]
        return nvidia

    def used(self) -> GpuReport | None:
        """The same for those GPUs that the environment leaves to this process: an ill one that is hidden harms nobody."""
        report = self.report()
        if report is None:
            return None
        selection = select(report.gpus, self._environment, report.vendor)
        return report if selection.mig_instances else replace(report, gpus=selection.gpus)


def device_checks(surroundings: Surroundings, asked: OwnChecks) -> list[Check]:
    """Checks of GPUs, of their links and of this host's ports. A tool is asked once, however many checks want its answer;
    without GPUs they are silent."""
    devices, host = LocalDevices(surroundings), surroundings.host

    def gpus() -> list[Verdict]:
        return judge_visible(
            devices.report(),
            pci=devices.pci(),
            bound=surroundings.names("/proc/driver/nvidia/gpus"),
            environment=surroundings.environment,
            local_world_size=asked.local_world_size,
            host=host,
        )

    def fabric_manager() -> list[Verdict]:
        report = devices.report()
        if not switched_fabric(report, num_switches=devices.pci().switches):
            return []
        return check_fabric(surroundings, report)

    def of_used(judge: Callable[..., list[Verdict]]) -> Callable[[], list[Verdict]]:
        def run() -> list[Verdict]:
            report = devices.used()
            return judge(report, host=host) if report is not None else []

        return run

    def pcie() -> list[Verdict]:
        return judge_pcie(read_lanes(surroundings, devices.used()), host=host)

    def counters() -> list[Verdict]:
        return check_counters(surroundings, now=time.time())

    return [
        Check("gpus", gpus, _TOOLS_LIMIT_S),
        Check("fabric_manager", fabric_manager, _TOOLS_LIMIT_S),
        Check("ecc", of_used(judge_ecc), _TOOLS_LIMIT_S),
        Check("row_remap", of_used(judge_row_remap), _TOOLS_LIMIT_S),
        Check("xid", lambda: _check_xids(surroundings, devices), _TOOLS_LIMIT_S),
        Check("throttle", of_used(judge_throttle), _TOOLS_LIMIT_S),
        Check("pcie", pcie, _TOOLS_LIMIT_S),
        Check("nvlink", lambda: _check_links(surroundings, devices), 2 * _TOOLS_LIMIT_S, quick=False),
        Check("counters", counters, 10.0),
    ]


def _check_xids(surroundings: Surroundings, devices: LocalDevices) -> list[Verdict]:
    report = devices.report()
    listed = report is not None and report.vendor is Vendor.NVIDIA and (report.gpus or report.lost)
    if not listed and not devices.pci().nvidia:
        return []
    xids = read_kernel_log(surroundings)
    if xids is not None and report is not None:
        used = devices.used()
        hidden = {gpu.bus for gpu in report.gpus} - {gpu.bus for gpu in (used.gpus if used else ())}
        xids = [xid for xid in xids if xid.bus not in hidden]
    return judge_xids(xids, report, host=surroundings.host)


def _check_links(surroundings: Surroundings, devices: LocalDevices) -> list[Verdict]:
    report, host = devices.used(), surroundings.host
    if report is None or len(report.gpus) < 2:
        return []
    if report.vendor is Vendor.AMD:
        amd = devices.amd()
        return judge_xgmi(amd[1] if amd is not None else {}, host=host)
    ask, used = partial(surroundings.ask, limit_s=_LINKS_LIMIT_S), {gpu.index for gpu in report.gpus}
    return judge_nvlink(
        [one for one in parse_links(ask("nvidia-smi", "nvlink", "--status")) if one.index in used],
        parse_topology(ask("nvidia-smi", "topo", "-m")),
        switched=switched_fabric(report, num_switches=devices.pci().switches),
        mig=all(gpu.mig for gpu in report.gpus),
        num_gpus=len(report.gpus),
        host=host,
    )
