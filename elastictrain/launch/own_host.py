"""The launcher's own host: names, address, number of workers, fitness checks, and notices of preemption."""

import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.gpus import needs_gpu, read_gpus, why_no_gpu
from elastictrain.fault.clouds import detect
from elastictrain.fault.notices import LimitSource, Notice, NoticePoller, NoticeSource
from elastictrain.fault.stop import StopListener
from elastictrain.launch.cluster.place import ClusterPlace, as_ip, visible_gpus
from elastictrain.launch.records import NoticeGiven, Recorder
from elastictrain.preflight.host_checks import HostFacts, OwnChecks, check_host
from elastictrain.preflight.policy import Level
from elastictrain.preflight.verdict import describe, failures
from elastictrain.surroundings import Surroundings

_NVIDIA_DEVICE = re.compile(r"nvidia\d+")
_LEAD_S = 120.0  # a known limit is met in time even if a large state must be saved


def own_names() -> tuple[str, ...]:
    """The names under which a list of hosts may contain this one."""
    name = socket.gethostname()
    return tuple(dict.fromkeys((name, name.partition(".")[0])))


def default_interface(surroundings: Surroundings) -> str:
    """The interface of the default route; empty if there is none. Source: proc(5), /proc/net/route."""
    for line in (surroundings.read("proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            return fields[0]
    return ""


class OwnAddress:
    """This host's address, checked at each `look()`. An address set by an operator or the cluster stays.
    Otherwise it stays while the host has it, even if the default route changes: a change costs a restart."""

    def __init__(self, first: str, *, own: Callable[[], Collection[str]], find: Callable[[], str]) -> None:
        """`own`: this host's addresses; `find`: the one that others may reach. A `first` outside `own()` was set by someone."""
        self._address = first
        self._own = own
        self._find = find
        self._is_set = first not in own()
        self._missing = False

    def look(self) -> str:
        """The address now; asks the kernel, and looks up names of peers."""
        missing = not self._is_set and self._address not in self._own()
        # Not at the first look: an interface that is being reconfigured has no address for a moment.
        if missing and self._missing and (ip := as_ip(found := self._find())) is not None and not ip.is_loopback:
            self._address = found
        self._missing = missing
        return self._address


def count_gpus(environment: Mapping[str, str], *, root: str = "/") -> int:
    """GPUs that a worker here would see, counted without a library; 0 if there are none."""
    devices = [path for path in Path(root, "dev").glob("nvidia*") if _NVIDIA_DEVICE.fullmatch(path.name)]
    found = len(devices)
    # Source: the kernel's amdkfd, whose nodes include CPUs; those have no SIMD units.
    for node in () if found else Path(root, "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with suppress(OSError):
            match = re.search(r"^simd_count (\d+)$", node.read_text(), re.MULTILINE)
            found += match is not None and int(match[1]) > 0
    visible = visible_gpus(environment)
    return min(found, visible[1]) if visible is not None else found


def why_unfit(config: RunConfig, surroundings: Surroundings, *, processes: int) -> str:
    """Why no GPU is usable where one is needed, or the first failed check with its remedy; empty if the host is fit.
    With `preflight=off` there are no checks."""
    if setting := config.parallel.needs_gpu:
        reason = why_no_gpu(read_gpus(surroundings.environment, root=surroundings.root))
        if reason:
            return needs_gpu(setting, reason)
    if config.preflight.level == "off":
        return ""
    asked = OwnChecks(
        # The group preflight checks in full; this only excludes a host that would fail there at once.
        level=Level.QUICK,
        settings=replace(config.preflight, checks=replace(config.preflight.checks, storage="off")),
        local_world_size=processes,
        run_dir=config.run.dir,
        memory_dir=config.checkpoint.memory_dir,
        cpus=float(config.run.num_threads * processes),
        # Nothing of the run listens here yet; in a group the preflight itself does.
        ports_free=True,
        transport=True,
    )
    failed = failures(check_host(HostFacts(surroundings, asked)))
    return describe(failed[0]) if failed else ""


class CloudSource:
    """The cloud's metadata service; the first look detects which cloud this is."""

    name = "the cloud's metadata service"

    @cached_property
    def _source(self) -> NoticeSource | None:
        return detect()

    def look(self) -> Notice | None:
        """None outside of clouds. Raises: MetadataError."""
        return None if self._source is None else self._source.look()


def watch_notices(
    config: RunConfig, place: ClusterPlace, *, listener: StopListener, recorder: Recorder, print_line: Callable[[str], None]
) -> NoticePoller:
    """Start the polling thread. A notice to leave becomes a stop request; a hint is only printed."""

    def on_notice(notice: Notice) -> None:
        recorder.record(0, NoticeGiven(reason=notice.reason, leave=notice.leave, deadline=notice.deadline))
        if notice.leave:
            listener.ask(notice.reason, deadline=notice.deadline)
        else:
            print_line(f"this host may be taken away soon ({notice.reason}); training continues")

    lead_s = max(config.fault.notice_s, _LEAD_S)
    limit = LimitSource(started=time.time(), max_hours=config.launch.max_hours, job_end=place.deadline, lead_s=lead_s)
    sources: list[NoticeSource] = [limit, CloudSource()] if config.launch.notices else [limit]
    poller = NoticePoller(sources, on_notice=on_notice)
    poller.start()
    return poller
