"""What a torchrun that was started ahead of time is told to do, and its answer. One line of JSON each; free of torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.fault.exits import Process

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
