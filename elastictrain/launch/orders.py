"""What a torchrun that was started ahead of time is told to do, and its answer. One line of JSON each; free of torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.fault.exits import Process
from elastictrain.fault.stop import STOP_FILE_VARIABLE
from elastictrain.identity import FOLDER, GENERATION, LAUNCHER, RESTARTED, STORE_HOST
from elastictrain.launch.membership.records import Generation

ANSWER_NAME = "torchrun.json"


@dataclass(frozen=True, slots=True)
class Orders:
    """One torchrun."""

    arguments: tuple[str, ...]
    """As on its command line."""

    environment: Mapping[str, str]
    """What is set in addition to what it was started with."""

    answer_file: str
    """Where it writes what it has seen of its workers' ends."""

    processes: int
    """Workers on this host."""

    hosts: tuple[str, ...]
    """Names of the generation's hosts, in order; torchrun's store is on the first."""

    limit_s: float
    """Until all hosts have met in that store, and workers start."""


def encode(orders: Orders) -> bytes:
    """One line."""
    rest = (orders.answer_file, orders.processes, list(orders.hosts), orders.limit_s)
    return json.dumps([list(orders.arguments), dict(orders.environment), *rest]).encode() + b"\n"


def decode(line: bytes) -> Orders:
    """The orders in a line."""
    arguments, environment, answer_file, processes, hosts, limit_s = json.loads(line)
    return Orders(tuple(arguments), environment, answer_file, processes, tuple(hosts), limit_s)


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What a torchrun has seen of its workers' ends."""

    codes: Mapping[int, int] = field(default_factory=dict)
    """Exit codes by local rank, negative for a signal."""

    leaving: tuple[Process, ...] = ()
    """Workers that may still hold devices and memory, and for which it has not waited."""

    unforked: str = ""
    """Why its workers, or some of them, are not forks of it; empty if they are."""

    missing: tuple[int, ...] = ()
    """Hosts, by place in the generation, that did not come to torchrun's store in time, or whose store it was."""


def write_answer(path: Path, answer: AgentAnswer) -> None:
    """Raises: OSError."""
    leaving = [[one.pid, one.started] for one in answer.leaving]
    path.write_text(json.dumps([dict(answer.codes), leaving, answer.unforked, list(answer.missing)]))


def read_answer(path: Path) -> AgentAnswer:
    """An empty one if there is none that can be read."""
    try:
        codes, leaving, unforked, missing = json.loads(path.read_text())
        return AgentAnswer(
            {int(rank): int(code) for rank, code in codes.items()},
            tuple(Process(int(pid), int(started)) for pid, started in leaving),
            str(unforked),
            tuple(map(int, missing)),
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return AgentAnswer()


_LOOPBACK = "127.0.0.1"
_MONITOR_INTERVAL_S = 0.1
_LIMIT_MARGIN_S = 60


@dataclass(frozen=True, slots=True)
class HostContext:
    """What only this host knows."""

    host: str
    address: str
    pid: int
    folder: str
    """For words between the launcher and the workers of one generation."""

    run_arguments: tuple[str, ...]
    """As on the launcher's command line."""

    restarted: bool
    stop_file: str
    rendezvous_limit_s: float


def plan_torchrun(generation: Generation, here: HostContext) -> Orders:
    """The torchrun of this host, which must be a member."""
    members = generation.members
    index = next(place for place, member in enumerate(members) if member.host == here.host)
    # A single host needs no network, not even its own address.
    alone = len(members) == 1
    arguments: Sequence[str] = (
        *("--nnodes", str(len(members))),
        *("--node-rank", str(index)),
        *("--nproc-per-node", str(members[index].processes)),
        *("--master-addr", _LOOPBACK if alone else members[0].address),
        *("--master-port", str(generation.master_port)),
        *("--local-addr", _LOOPBACK if alone else here.address),
        # Its own limit of 600 s ends by a sentence that names nobody: ours comes first.
        *("--rdzv-conf", f"timeout={math.ceil(here.rendezvous_limit_s) + _LIMIT_MARGIN_S}"),
        # What follows an end is decided by the hosts together, not by each torchrun for itself.
        *("--max-restarts", "0"),
        *("--monitor-interval", str(_MONITOR_INTERVAL_S)),
        # Else it leaves empty folders in the one for temporary files.
        *("--log-dir", f"{here.folder}/torchrun"),
        *("-m", "elastictrain.run"),
        *here.run_arguments,
    )
    environment = {
        LAUNCHER: str(here.pid),
        GENERATION: str(generation.number),
        RESTARTED: "1" if here.restarted else "0",
        FOLDER: here.folder,
        STORE_HOST: members[0].name,
        STOP_FILE_VARIABLE: here.stop_file,
    }
    return Orders(
        tuple(arguments),
        environment,
        answer_file=f"{here.folder}/{ANSWER_NAME}",
        processes=members[index].processes,
        hosts=tuple(member.name for member in members),
        limit_s=here.rendezvous_limit_s,
    )
