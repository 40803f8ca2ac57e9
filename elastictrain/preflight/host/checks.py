"""All checks of a host, put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastictrain.preflight.check import Check
from elastictrain.preflight.host.cpu import judge_cpu, judge_load, read_cpu
from elastictrain.preflight.host.disk import folders_of, judge_disks, judge_shared_memory, read_disks, read_shared_memory
from elastictrain.preflight.host.limits import judge_memlock, judge_open_files, judge_processes, read_limits
from elastictrain.preflight.host.memory import judge_memory, read_memory
from elastictrain.preflight.host.names import (
    LIMIT_S,
    Resolver,
    SystemResolver,
    judge_lookups,
    judge_name,
    read_lookups,
    read_name,
)
from elastictrain.preflight.host.ports import WantedPort, judge_ports, read_ports
from elastictrain.preflight.host.storage_trip import LIMIT_S as TRIP_LIMIT_S
from elastictrain.preflight.host.storage_trip import judge_trip, read_trip
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Verdict

_LIMIT_S = 3.0
"""For what only reads files of the kernel; a dead file server is what can make it longer."""

_MARGIN_S = 1.0
"""A check that limits its own waiting should say itself what it waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a run wants of this host; None where nobody knows."""

    run_dir: str | None = None
    several_hosts: bool = False

    address: str | None = None
    """By which other hosts reach this one."""

    towards: str | None = None
    """An address of another host, such as that of the rendezvous; tells the own address where that is not given."""

    ports: tuple[WantedPort, ...] = ()
    """That something on this host will listen on."""

    memory_dir: str = "/dev/shm"  # noqa: S108
    cpus: float | None = None
    """That the ranks of this host keep busy: ranks x threads."""

    rdma: bool = False
    """Whether this host has InfiniBand, RoCE or EFA that will be used."""

    trip_limit_s: float = TRIP_LIMIT_S


def host_checks(
    surroundings: Surroundings,
    options: HostOptions,
    *,
    resolver: Resolver | None = None,
) -> list[Check]:
    """Every check that a host can do on its own, without torch and without other hosts. On a healthy host all of them, side by
    side, take well under a second, and only `storage` takes longer where a client of an object store must be loaded."""
    host = surroundings.host
    asked = resolver or SystemResolver()

    def storage() -> Sequence[Verdict]:
        trip = None
        if options.run_dir:
            trip = read_trip(surroundings, url=options.run_dir, limit_s=options.trip_limit_s)
        return [judge_trip(trip, host=host, environment=surroundings.environment)]

    def disk() -> Sequence[Verdict]:
        environment = surroundings.environment
        folders = folders_of(options.run_dir, environment=environment)
        return judge_disks(read_disks(surroundings, folders), host=host)

    def name() -> Verdict:
        facts = read_name(surroundings, resolver=asked, address=options.address, towards=options.towards)
        return judge_name(facts, several_hosts=options.several_hosts)

    def shared_memory() -> Verdict:
        return judge_shared_memory(read_shared_memory(surroundings, memory_dir=options.memory_dir), host=host)

    def cpu() -> Verdict:
        facts = read_cpu(surroundings, needed=options.cpus)
        return judge_cpu(facts, host=host)

    one = _single
    return [
        Check("name", one(name), LIMIT_S + _MARGIN_S),
        Check(
            "lookup",
            one(lambda: judge_lookups(read_lookups(surroundings, resolver=asked, address=options.address), host=host)),
            LIMIT_S + _MARGIN_S,
        ),
        Check("ports", lambda: judge_ports(read_ports(surroundings, options.ports), host=host), _LIMIT_S),
        Check("storage", storage, options.trip_limit_s + _MARGIN_S),
        Check("disk", disk, _LIMIT_S),
        Check("shared_memory", one(shared_memory), _LIMIT_S),
        Check("memory", one(lambda: judge_memory(read_memory(surroundings), host=host)), _LIMIT_S),
        Check("memlock", one(lambda: judge_memlock(read_limits(surroundings), host=host, rdma=options.rdma)), _LIMIT_S),
        Check("open_files", one(lambda: judge_open_files(read_limits(surroundings), host=host)), _LIMIT_S),
        Check("processes", one(lambda: judge_processes(read_limits(surroundings), host=host)), _LIMIT_S),
        Check("cpu", one(cpu), _LIMIT_S),
        Check("load", one(lambda: judge_load(read_cpu(surroundings, needed=options.cpus), host=host)), _LIMIT_S),
    ]


def _single(judge: Callable[[], Verdict]) -> Callable[[], Sequence[Verdict]]:
    return lambda: [judge()]
