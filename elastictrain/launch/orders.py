"""What a torchrun that was started ahead of time is told to do, and its answer. Free of torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from elastictrain.bounded_json import as_record
from elastictrain.fault.exits import Process
from elastictrain.fault.stop import STOP_FILE_VARIABLE
from elastictrain.identity import FOLDER, GENERATION, LAUNCHER, RESTARTED, STORE_HOST
from elastictrain.launch.membership.records import Generation, HostRecord

ANSWER_NAME = "torchrun.json"
STOP_NAME = "stop.json"

_LOOPBACK = "127.0.0.1"
_MONITOR_INTERVAL_S = 0.1
_LIMIT_MARGIN_S = 60


@dataclass(frozen=True, slots=True)
class Orders:
    """One torchrun."""

    arguments: tuple[str, ...]
    """As on its command line."""

    environment: Mapping[str, str]
    """What is set in addition to what it was started with."""

    answer_file: str
    processes: int
    hosts: tuple[str, ...]
    """Names of the generation's hosts, in order; torchrun's store is on the first."""

    limit_s: float
    """Until all hosts have met in that store, and workers start."""


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


def encode(orders: Orders) -> bytes:
    """One line. Arguments that are not UTF-8 stay what they are."""
    return json.dumps(msgspec.to_builtins(orders)).encode() + b"\n"


def decode(line: bytes) -> Orders:
    """The orders in a line."""
    return as_record(json.loads(line), Orders)


def write_answer(path: Path, answer: AgentAnswer) -> None:
    """Raises: OSError."""
    path.write_text(json.dumps(msgspec.to_builtins(answer, str_keys=True)))


def read_answer(path: Path) -> AgentAnswer:
    """An empty one if there is none that can be read."""
    try:
        return as_record(json.loads(path.read_text()), AgentAnswer)
    except (OSError, ValueError):
        return AgentAnswer()


def plan_torchrun(
    generation: Generation,
    here: HostRecord,
    *,
    folder: str,
    pid: int,
    run_arguments: tuple[str, ...],
    restarted: bool,
    limit_s: float,
) -> Orders:
    """The torchrun of this host, which must be a member.

    `folder` is for what the launcher and the workers of one generation tell each other; `pid` is the launcher's.
    """
    members = generation.members
    index = next(place for place, member in enumerate(members) if member.host == here.host)
    # A single host needs no network, not even its own address.
    alone = len(members) == 1
    arguments = (
        *("--nnodes", str(len(members))),
        *("--node-rank", str(index)),
        *("--nproc-per-node", str(members[index].processes)),
        *("--master-addr", _LOOPBACK if alone else members[0].address),
        *("--master-port", str(generation.master_port)),
        *("--local-addr", _LOOPBACK if alone else here.address),
        # Its own limit of 600 s ends by a sentence that names nobody: ours comes first.
        *("--rdzv-conf", f"timeout={math.ceil(limit_s) + _LIMIT_MARGIN_S}"),
        # What follows an end is decided by the hosts together, not by each torchrun for itself.
        *("--max-restarts", "0"),
        *("--monitor-interval", str(_MONITOR_INTERVAL_S)),
        # Else it leaves empty folders in the one for temporary files.
        *("--log-dir", f"{folder}/torchrun"),
        *("-m", "elastictrain.run"),
        *run_arguments,
    )
    environment = {
        LAUNCHER: str(pid),
        GENERATION: str(generation.number),
        RESTARTED: "1" if restarted else "0",
        FOLDER: folder,
        STORE_HOST: members[0].name,
        STOP_FILE_VARIABLE: f"{folder}/{STOP_NAME}",
    }
    hosts = tuple(member.name for member in members)
    return Orders(arguments, environment, f"{folder}/{ANSWER_NAME}", members[index].processes, hosts, limit_s)
