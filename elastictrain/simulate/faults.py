"""What happens to a fleet: faults at a seeded rate, or hosts that come and go as in a recorded trace."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_json, parse_record
from elastictrain.errors import UsageError

_HOUR_S = 3600.0


class FaultKind(StrEnum):
    WORKER = "worker"  # a worker is killed
    HANG = "hang"  # a worker makes no call any more, until it is killed for that when it has lasted
    LAUNCHER = "launcher"  # all processes of a host are killed, and the kernel says so; another launcher follows on the host
    UNFIT = "unfit"  # no generation passes its checks with a host
    HOST = "host"  # a host vanishes without a word
    NOTICE = "notice"  # a host is taken away, and is told before
    NETWORK = "network"  # hosts and the rest of the fleet do not reach each other; both reach storage
    ONE_WAY = "one_way"  # hosts do not hear the rest of the fleet, and are heard by it
    STORAGE = "storage"  # hosts do not reach storage
    COME = "come"  # a host is there (again)
    SAVES = "saves"  # storage refuses, is slow or full: no checkpoint becomes durable
    SHARD = "shard"  # the newest checkpoint is damaged


@dataclass(frozen=True, slots=True)
class FleetFault:
    at_s: float
    kind: FaultKind
    machines: tuple[int, ...]
    lasts_s: float = inf  # until the hosts are back, or reached again


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """What has happened to a real run, from its first start on: the command `chaos` writes it."""

    hosts: int
    seconds: float
    faults: tuple[FleetFault, ...]


def write_history(history: FaultHistory) -> str:
    """JSON, a line for each fault; hosts that do not come back have no `lasts_s`."""
    rows = [{key: value for key, value in asdict(one).items() if value != inf} for one in history.faults]
    head = encode_record({"hosts": history.hosts, "seconds": history.seconds}).decode()
    return f'{head[:-1]},"faults":[\n ' + ",\n ".join(encode_record(row).decode() for row in rows) + "\n]}\n"


def read_history(path: Path) -> FaultHistory:
    """Raises: UsageError."""
    try:
        history = parse_record(path.read_text(encoding="utf-8"), FaultHistory)
    except (OSError, MalformedJsonError) as error:
        raise UsageError(f"--history must be a file that the chaos command wrote, but {path} is not: {error}") from None
    if any(machine not in range(history.hosts) for fault in history.faults for machine in fault.machines):
        raise UsageError(f"{path} must have machines from 0 to {history.hosts - 1}, but has others")
    return history


@dataclass(frozen=True, slots=True)
class Rates:
    """Hours of one host between two faults of a kind; 0: none. The defaults have the sum that "The Llama 3 Herd of Models"
    (arXiv 2407.21783) tells of: 419 unexpected interruptions of 2,048 hosts in 54 days."""

    worker_h: float = 12_500.0
    host_h: float = 20_000.0
    notice_h: float = 0.0
    network_h: float = 50_000.0
    back_s: float = 1800.0  # seconds after which a lost host is replaced, in the mean; exponential
    down_s: float = 30.0  # seconds for which the network is out, in the mean; exponential


def seeded(rates: Rates, *, machines: int, until_s: float, seed: int) -> Iterator[FleetFault]:
    """Faults of a fleet in the order of time: for each kind a Poisson process."""
    kinds = (
        (FaultKind.WORKER, rates.worker_h, 0.0),
        (FaultKind.HOST, rates.host_h, rates.back_s),
        (FaultKind.NOTICE, rates.notice_h, rates.back_s),
        (FaultKind.NETWORK, rates.network_h, rates.down_s),
    )
    streams = (
        _poisson(Random(f"{seed} {kind}"), kind, every_s=hours * _HOUR_S / machines, mean_s=mean_s, n=machines, until_s=until_s)
        for kind, hours, mean_s in kinds
        if hours
    )
    return heapq.merge(*streams, key=lambda fault: fault.at_s)


def _poisson(chance: Random, kind: FaultKind, *, every_s: float, mean_s: float, n: int, until_s: float) -> Iterator[FleetFault]:
    at_s = chance.expovariate(1 / every_s)
    while at_s < until_s:
        yield FleetFault(at_s, kind, (chance.randrange(n),), chance.expovariate(1 / mean_s) if mean_s else 0.0)
        at_s += chance.expovariate(1 / every_s)


def read_trace(path: Path) -> list[tuple[float, int]]:
    """How many hosts there are from when on, from a file in one of two formats: lines `seconds,hosts`; or JSON with
    `metadata.gap_seconds` and `data`, the number of hosts in each such interval. Raises: UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            value = parse_json(text)
            gap_s = float(value["metadata"]["gap_seconds"])
            counts = [(place * gap_s, int(count)) for place, count in enumerate([*value["data"], value["data"][-1]])]
        else:
            pairs = (line.split(",") for line in text.splitlines() if line.strip())
            counts = [(float(second), int(count)) for second, count in pairs]
    except (OSError, MalformedJsonError, ValueError, LookupError, TypeError) as error:
        expected = "lines `seconds,hosts`, or JSON with metadata.gap_seconds and data"
        raise UsageError(f"{path} must have {expected}, but cannot be read so: {type(error).__name__}: {error}") from None
    if any(later < earlier for (earlier, _), (later, _) in pairwise(counts)):
        raise UsageError(f"{path} must have numbers of hosts in the order of time, but goes back in time")
    numbers = [count for _, count in counts]
    if not counts or min(numbers) < 0 or max(numbers) < 1:
        raise UsageError(f"{path} must have numbers of hosts >= 0, and one > 0, but has {sorted(set(numbers))[:2]}")
    return counts


def replay(
    counts: Sequence[tuple[float, int]], *, machines: int, until_s: float, seed: int, noticed: float = 0.0
) -> Iterator[FleetFault]:
    """The hosts of a trace, scaled so that its most are `machines`, again from its begin where it ends; all are there before
    it begins. Who goes is drawn; the share `noticed` of them is told before."""
    chance, there, begins_s = Random(seed), set(range(machines)), 0.0
    most, length_s = max(count for _, count in counts), counts[-1][0] + 1.0
    while begins_s < until_s:
        for second, count in counts:
            at_s, wanted = begins_s + second, round(count * machines / most)
            if at_s >= until_s:
                return
            for machine in chance.sample(sorted(there), max(0, len(there) - wanted)):
                there.remove(machine)
                yield FleetFault(at_s, FaultKind.NOTICE if chance.random() < noticed else FaultKind.HOST, (machine,))
            for machine in sorted(set(range(machines)) - there)[: max(0, wanted - len(there))]:
                there.add(machine)
                yield FleetFault(at_s, FaultKind.COME, (machine,))
        begins_s += length_s
