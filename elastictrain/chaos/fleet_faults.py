"""What faults do to hosts and the network between them, as the simulator of fleets knows it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from elastictrain.chaos.blame import Struck
from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.report.failures import FailureRecord
from elastictrain.simulate.faults import FaultHistory, FaultKind, FleetFault

LAUNCHER_BACK_S = 1.0  # until whoever watches over launchers starts one again
OTHER_CODE_S = 10.0  # for which a launcher with other code is there

ON_HOST: Mapping[ChaosKind, tuple[FaultKind, ...]] = {
    ChaosKind.KILL_WORKER: (FaultKind.WORKER,),
    ChaosKind.FLIP_SNAPSHOT: (FaultKind.WORKER,),
    ChaosKind.FLIP_GRADIENT: (FaultKind.WORKER,),
    ChaosKind.HANG: (FaultKind.HANG,),
    ChaosKind.KILL_LAUNCHER: (FaultKind.LAUNCHER,),
    ChaosKind.FLIP_REPLICA: (FaultKind.LAUNCHER,),
    ChaosKind.HOST_LOST: (FaultKind.HOST,),
    ChaosKind.FREEZE: (FaultKind.NETWORK, FaultKind.STORAGE),
    ChaosKind.CABLE: (FaultKind.NETWORK,),
}
"""What faults of one host do to it. A cable leads to the other hosts, and not to storage."""

_OF_STORAGE = (
    *(ChaosKind.STORE_503, ChaosKind.STORE_SLOW, ChaosKind.STORE_AWAY),
    *(ChaosKind.SLOW_DISK, ChaosKind.FULL_DISK),
)
_LASTS_S = {
    ChaosKind.KILL_LAUNCHER: LAUNCHER_BACK_S,
    ChaosKind.FLIP_SHARD: LAUNCHER_BACK_S,
    ChaosKind.WRONG_VERSION: OTHER_CODE_S,
}


def fault_history(
    struck: Sequence[Struck], failures: Mapping[int, FailureRecord], *, hosts: Sequence[str], begin_s: float, end_s: float
) -> FaultHistory:
    """What has happened to a run that began and ended then. `failures`: what the nth fault was followed by."""
    found = list[FleetFault]()
    for number, one in enumerate(struck):
        fault, failure = one.fault, failures.get(number)
        if fault.kind is ChaosKind.HANG and failure is not None:
            fault = replace(fault, lasts_s=failure.time - one.time_s)
        found += fleet_faults(fault, at_s=one.time_s - begin_s, hosts=hosts)
    return FaultHistory(len(hosts), end_s - begin_s, tuple(sorted(found, key=lambda one: one.at_s)))


def fleet_faults(fault: PlannedFault, *, at_s: float, hosts: Sequence[str]) -> Iterator[FleetFault]:
    """Yields nothing for kinds that stop neither hosts nor saves. `at_s`: since the run began; machines are places in `hosts`.
    Pure."""
    everyone = tuple(range(len(hosts)))
    first = hosts.index(fault.host) if fault.host else 0
    lasts_s = fault.lasts_s or _LASTS_S.get(fault.kind, 0.0)
    match fault.kind:
        case ChaosKind.LEAVE:
            # It is off when its time has come, or another comes, whichever is first.
            yield FleetFault(at_s, FaultKind.NOTICE, (first,), inf)
            yield FleetFault(at_s + min(fault.amount, lasts_s), FaultKind.HOST, (first,), inf)
            yield FleetFault(at_s + lasts_s, FaultKind.COME, (first,))
        case ChaosKind.ONE_WAY:
            # What it sends is lost: the others do not hear it.
            yield FleetFault(at_s, FaultKind.ONE_WAY, tuple(one for one in everyone if one != first), lasts_s)
        case ChaosKind.PARTITION:
            inside = tuple((first + number) % len(hosts) for number in range(int(fault.amount)))
            yield FleetFault(at_s, FaultKind.NETWORK, inside, lasts_s)
        case ChaosKind.BLIP:
            yield from (FleetFault(at_s, FaultKind.NETWORK, (machine,), lasts_s) for machine in everyone[1:])
        case ChaosKind.WRONG_VERSION:
            # It takes the place of the right launcher, which comes again.
            yield FleetFault(at_s, FaultKind.UNFIT, (first,), lasts_s)
            for killed_s in (at_s, at_s + lasts_s):
                yield FleetFault(killed_s, FaultKind.LAUNCHER, (first,), 0.0)
        case _ if fault.kind in _OF_STORAGE:
            yield FleetFault(at_s, FaultKind.SAVES, (), lasts_s)
        case ChaosKind.FLIP_SHARD:
            yield FleetFault(at_s, FaultKind.SHARD, (), lasts_s)
            yield FleetFault(at_s, FaultKind.LAUNCHER, everyone, lasts_s)
        case _:
            for kind in ON_HOST.get(fault.kind, ()):
                yield FleetFault(at_s, kind, (first,), lasts_s)
