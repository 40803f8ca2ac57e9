"""What a torchrun that was started ahead of time is told to do, and its answer. One line of JSON each; free of torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

CODES_NAME = "torchrun.json"


@dataclass(frozen=True, slots=True)
class Orders:
    """One torchrun."""

    arguments: tuple[str, ...]
    """As on its command line."""

    environment: Mapping[str, str]
    """What is set in addition to what it was started with."""

    codes_file: str
    """Where it writes how each worker ended."""

    processes: int
    """Workers on this host."""


def encode(orders: Orders) -> bytes:
    """One line."""
    return json.dumps([list(orders.arguments), dict(orders.environment), orders.codes_file, orders.processes]).encode() + b"\n"


def decode(line: bytes) -> Orders:
    """The orders in a line."""
    arguments, environment, codes_file, processes = json.loads(line)
    return Orders(tuple(arguments), environment, codes_file, processes)
