"""Checks that a host runs alone, on itself, its devices and interfaces; side by side, each under a deadline. No torch."""

import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import psutil

from elastictrain.cgroup import read_allowance, read_mounts
from elastictrain.config.preflight import PreflightGroup
from elastictrain.distributed.bounded import each_within, within
from elastictrain.preflight.host import amd, counters, kernel_log, names, nvidia, nvlink, resources, storage_trip, visible
from elastictrain.preflight.host.gpu import GpuReport, Trouble, Vendor, judge_ecc, judge_row_remap, judge_throttle
from elastictrain.preflight.policy import Level, apply_modes
from elastictrain.preflight.transport.infiniband import Rdma, kinds_here
from elastictrain.preflight.transport.judge import judge_infiniband, judge_interface
from elastictrain.preflight.transport.plan import read_facts
from elastictrain.preflight.verdict import Reporter, Verdict
from elastictrain.surroundings import Surroundings

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FILES_LIMIT_S = 3.0  # for checks that only read kernel files; a dead file server can make them longer
_MARGIN_S = 1.0  # longer than a check's own wait, so that the check itself reports what it waited for
# Two calls of a vendor's tool, each with its own limit, and some room: a check must outlast the tool that it waits for.
_TOOLS_S = 45.0
_TRANSPORT_LIMIT_S = 5.0


def once(ask: Callable[[], T]) -> Callable[[], T]:
    """Caches the first result for all threads. A call that raises is not cached: the next caller asks again."""
    lock, cached = threading.Lock(), cache(ask)

    def answer() -> T:
        # Checks run side by side: the second caller waits for the first one's tool instead of starting it again.
        with lock:
            return cached()

    return answer


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one host. `run` returns one verdict or several, in any scope."""

    name: str
    run: Callable[[], Verdict | Sequence[Verdict]]
    limit_s: float = _FILES_LIMIT_S  # no answer after this is a failure
    quick: bool = True  # part of a quick preflight, too


def run_checks(checks: Sequence[Check], *, subject: str) -> list[Verdict]:
    """The verdicts of all checks, in their order; each check runs in a thread of its own. Never raises, and never takes longer
    than the longest limit: a check that does not answer in time, or raises, is a failure."""
    answers = each_within([(check.limit_s, partial(_run, check, subject=subject)) for check in checks])
    found: list[Verdict] = []
    for check, answer in zip(checks, answers, strict=True):
        if answer is None:
            report, limit = Reporter(check.name, subject, seconds=check.limit_s), f"{check.limit_s:g} s"
            remedy = f"look at what the check waits for on {subject}; to continue without it: preflight.checks.{check.name}=off"
            found.append(replace(report.failed(f"no answer in {limit}", expected="an answer", remedy=remedy), may_pass=True))
        found += answer or []
    return found


def _run(check: Check, *, subject: str) -> Sequence[Verdict]:
    began = time.monotonic()
    try:
        found = check.run()
        verdicts = [found] if isinstance(found, Verdict) else list(found)
    except Exception as error:
        # A check that raises knows nothing about its subject: this must be a finding, not the end of the thread.
        logger.exception("check %s broke", check.name)
        remedy = f"report it as a bug; to continue without this check: preflight.checks.{check.name}=off"
        measured = f"{type(error).__name__}: {error}"
        verdicts = [Reporter(check.name, subject).failed(measured, expected="an answer", remedy=remedy)]
    seconds = round(time.monotonic() - began, 4)
    return [replace(verdict, seconds=seconds) for verdict in verdicts]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChecks:
    """Request for a host's own checks; None is unknown."""

    level: Level
    settings: PreflightGroup = field(default_factory=PreflightGroup)
    local_world_size: int | None = 1
    run_dir: str | None = None
    memory_dir: str = "/dev/shm"  # noqa: S108
    cpus: float | None = None  # that its ranks keep busy: ranks x threads
    several_hosts: bool = False
    towards: str | None = None  # an address of another host (the rendezvous), which shows the own address
    ports_free: bool = False  # `preflight.ports` must be free: nothing of the run listens there yet
    shared: storage_trip.SharedFolder | None = None  # with other hosts, which must see the same `run_dir`
    transport: bool = False  # judge interfaces and InfiniBand, too, by what this host alone knows


def check_host(at: "HostFacts") -> list[Verdict]:
    """Run all checks of this host side by side; never raises."""
    modes, full = at.asked.settings.modes, at.asked.level is Level.FULL
    chosen = [check for check in own_checks(at) if modes.get(check.name) != "off" and (check.quick or full)]
    return apply_modes(run_checks(chosen, subject=at.host), modes)


def own_checks(at: "HostFacts") -> list[Check]:
    """The table of checks; a new one has its function below, or its facts and judge in `preflight/host`. On a healthy host they
    take well under a second together; only `storage` takes longer, to import an object store's client."""
    surroundings, asked, host, names_s = at.surroundings, at.asked, at.host, names.LIMIT_S + _MARGIN_S
    ports, ranks = asked.settings.ports if asked.ports_free else (), asked.local_world_size
    table = [
        Check("name", lambda: names.judge_name(at.names(), several_hosts=asked.several_hosts), names_s),
        Check("lookup", lambda: names.judge_lookups(at.names(), host=host), names_s),
        Check("ports", lambda: [names.check_port(port, host=host) for port in ports]),
        Check("storage", at.check_storage, 2 * asked.settings.limits.storage_s + _MARGIN_S),
        Check("disk", at.check_disk),
        Check("shared_memory", at.check_shared_memory),
        Check("memory", at.check_memory),
        Check("memlock", at.check_memlock),
        Check("infiniband", at.check_libraries),
        Check("open_files", lambda: resources.judge_open_files(resources.read_limit(resource.RLIMIT_NOFILE), host=host)),
        Check("processes", at.check_processes),
        Check("cpu", lambda: resources.judge_cpu(at.allowance(), visible=at.visible_cpus, needed=asked.cpus, host=host)),
        Check("load", lambda: resources.judge_load(round(os.getloadavg()[0], 2), cpus=psutil.cpu_count() or 1, host=host)),
        Check("gpus", lambda: visible.check_visible(surroundings, at.report(), pci=at.pci(), local_world_size=ranks), _TOOLS_S),
        Check(
            "fabric_manager", lambda: nvlink.check_fabric(surroundings, at.report(), num_switches=at.pci().switches), _TOOLS_S
        ),
        Check("ecc", lambda: at.of_used(judge_ecc), _TOOLS_S),
        Check("row_remap", lambda: at.of_used(judge_row_remap), _TOOLS_S),
        Check("xid", at.check_xids, _TOOLS_S),
        Check("throttle", lambda: at.of_used(judge_throttle), _TOOLS_S),
        Check("pcie", lambda: visible.judge_pcie(visible.read_lanes(surroundings, at.used()), host=host), _TOOLS_S),
        Check("nvlink", at.check_nvlink, 2 * _TOOLS_S, quick=False),
        Check("counters", at.check_counters, 2 * _TOOLS_S),
    ]
    if asked.transport:
        table.append(Check("interface", lambda: judge_interface(at.transport()), _TRANSPORT_LIMIT_S))
        table.append(Check("infiniband", lambda: judge_infiniband(at.transport()), _TRANSPORT_LIMIT_S))
    return table


class HostFacts:
    """The facts of this host, each read at most once, and the checks that need more than one of them."""

    def __init__(self, surroundings: Surroundings, asked: OwnChecks) -> None:
        self.surroundings, self.asked, self.host = surroundings, asked, surroundings.host
        self.visible_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.allowance = once(lambda: read_allowance(surroundings.root))
        self.names = once(lambda: names.read_names(surroundings, towards=asked.towards))
        self.transport = once(lambda: read_facts(surroundings, rendezvous=None, alone=True))
        self._capabilities = once(lambda: resources.read_capabilities(surroundings))
        self.pci = once(lambda: visible.read_pci(surroundings))
        self._nvlink = partial(surroundings.ask, "nvidia-smi", "nvlink", limit_s=20.0)
        self._nvidia = once(lambda: nvidia.read_nvidia(surroundings))
        self._amd = once(lambda: amd.read_amd(surroundings))

    def report(self) -> GpuReport | None:
        """The GPUs of NVIDIA, or else of AMD; None without any vendor's tool."""
        report = self._nvidia()
        # Images often carry nvidia-smi on hosts with AMD's GPUs, or none.
        absent = report is None or report.trouble in {Trouble.NO_DRIVER, Trouble.NO_DEVICES}
        if absent and not self.pci().nvidia and (other := self._amd()) is not None:
            return other[0]
        return report

    def used(self) -> GpuReport | None:
        """With those GPUs that this process may use."""
        report = self.report()
        return report and replace(report, gpus=visible.visible_gpus(report, self.surroundings.environment))

    def uses_rdma(self) -> bool:
        """Whether this host will use InfiniBand, RoCE or EFA."""
        # A person's settings may be in a home folder whose server is dead.
        facts = within(2.0, self.transport)
        return facts is not None and bool(kinds_here(facts.ports, settings=facts.settings) - {Rdma.NONE, Rdma.UNKNOWN})

    def of_used(self, judge: Callable[..., list[Verdict]]) -> list[Verdict]:
        report = self.used()
        return judge(report, host=self.host) if report is not None else []

    def check_storage(self) -> Verdict:
        url, limit_s = self.asked.run_dir, self.asked.settings.limits.storage_s
        read = partial(storage_trip.read_trip, self.surroundings, limit_s=limit_s, shared=self.asked.shared)
        trip = read(url=url) if url else None
        return storage_trip.judge_trip(trip, host=self.host, environment=self.surroundings.environment)

    def check_disk(self) -> list[Verdict]:
        mounts = read_mounts(self.surroundings.root)
        folders = resources.folders_of(self.asked.run_dir, environment=self.surroundings.environment)
        return [
            resources.judge_disk(folder, resources.read_space(folder.path, mounts=mounts), host=self.host) for folder in folders
        ]

    def check_shared_memory(self) -> Verdict:
        folder, mounts = self.asked.memory_dir, read_mounts(self.surroundings.root)
        return resources.judge_shared_memory(folder, resources.read_space(folder, mounts=mounts), host=self.host)

    def check_memory(self) -> Verdict:
        found, swapped, group = psutil.virtual_memory(), psutil.swap_memory().used, self.allowance().memory
        total, free = found.total, found.available
        return resources.judge_memory(total=total, available=free, swapped=swapped, group=group, host=self.host)

    def check_memlock(self) -> Verdict:
        limit, capabilities = resources.read_limit(resource.RLIMIT_MEMLOCK), self._capabilities()
        return resources.judge_memlock(limit, capabilities=capabilities, host=self.host, rdma=self.uses_rdma())

    def check_libraries(self) -> list[Verdict]:
        names = (resources.VERBS, resources.CONNECTIONS) if self.uses_rdma() else ()
        missing = [name for name in names if not self.surroundings.can_load(name)]
        return resources.judge_libraries(missing, host=self.host, several_hosts=self.asked.several_hosts)

    def check_processes(self) -> Verdict:
        limit, group = resources.read_limit(resource.RLIMIT_NPROC), self.allowance().processes
        return resources.judge_processes(limit, group, capabilities=self._capabilities(), host=self.host)

    def check_xids(self) -> list[Verdict]:
        """Empty without NVIDIA's GPUs. Leaves out errors of GPUs that this process may not use."""
        report = self.report()
        listed = report is not None and report.vendor is Vendor.NVIDIA and (report.gpus or report.lost)
        if not listed and not self.pci().nvidia:
            return []
        xids = kernel_log.read_kernel_log(self.surroundings)
        if xids is not None and report is not None and (used := self.used()) is not None:
            hidden = {gpu.bus for gpu in report.gpus} - {gpu.bus for gpu in used.gpus}
            xids = [xid for xid in xids if xid.bus not in hidden]
        return kernel_log.judge_xids(xids, report, host=self.host)

    def check_counters(self) -> list[Verdict]:
        report = self.used()
        gpus = report.gpus if report is not None else ()
        linked = len(gpus) > 1 and report is not None and report.vendor is Vendor.NVIDIA
        errors = nvlink.parse_errors(self._nvlink("-e") if linked else "")
        after = counters.read_counters(self.surroundings, now=time.time(), gpus=gpus, errors=errors)
        return counters.check_counters(self.surroundings, after)

    def check_nvlink(self) -> list[Verdict]:
        """With AMD's GPUs it checks xGMI. Empty if this process may use fewer than two GPUs."""
        report = self.used()
        if report is None or len(report.gpus) < 2:
            return []
        if report.vendor is Vendor.AMD:
            found = self._amd()
            return amd.judge_xgmi(found[1] if found is not None else {}, host=self.host)
        text, used = self._nvlink("--status"), {gpu.index for gpu in report.gpus}
        links = [one for one in nvlink.parse_links(text) if one.index in used]
        switched, mig = nvlink.switched_fabric(report, num_switches=self.pci().switches), all(gpu.mig for gpu in report.gpus)
        return nvlink.judge_nvlink(links, switched=switched, mig=mig, num_gpus=len(used), host=self.host)
