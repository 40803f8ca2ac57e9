"""The place of a launcher in its cluster, and the reader of the environment that finds it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Literal

from elastictrain.errors import ConfigError, Problem

_WHOLE = re.compile(r"[0-9]{1,18}")
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    kind: Literal["slurm", "kubernetes", "runai", "vast", "plain"]
    role: Literal["launcher", "idle"] = "launcher"  # idle tasks wait for this host's launcher task to end, and end with it
    order: int = -1  # this host's number among the cluster's hosts; -1 if they have no numbers
    num_hosts: int = 0  # hosts that the cluster promised; 0 if unknown
    processes: int = 0  # workers of this host; 0: as many as it has GPUs
    address: str = ""  # at which the other hosts reach this one; empty: the source address of the route to them
    peers: tuple[str, ...] = ()
    deadline: float | None = None  # Unix time at which the cluster ends the job; None if unknown
    job: str = ""  # the cluster's name for the job; empty if unknown
    conclusions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what is probably a mistake, and its remedy


class EnvironmentReader:
    """Reads environment variables, and collects problems, warnings and conclusions."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.conclusions: list[str] = []
        self.warnings: list[str] = []
        self._problems: dict[str, Problem] = {}

    def first(self, *names: str) -> str:
        """The first name that is set; empty if none is."""
        return next((name for name in names if name in self.environment), "")

    def text(self, *names: str) -> str:
        """Value of the first name that is set; empty if none is."""
        return self.environment.get(self.first(*names), "")

    def whole(self, *names: str, least: int = 0) -> int | None:
        """The first name that is set, as a number; None if none is set or the value is no such number (a problem)."""
        name = self.first(*names)
        if not name:
            return None
        number = as_whole(self.environment[name])
        if number is None or number < least:
            self.require(name, f"a whole number >= {least}")
            return None
        return number

    def show(self, *names: str) -> str:
        """`NAME=value` of the first name that is set."""
        name = self.first(*names)
        return f"{name}={self.environment[name]}" if name else ""

    def require(self, name: str, expected: str, *, hint: str = "") -> None:
        """Add a problem: the variable must be `expected`, but is not."""
        found = "not"
        if name in self.environment:
            text = self.environment[name]
            found = repr(text) if as_whole(text) is None else text
        self.refuse(name, f"must be {expected} in the environment, but is {found}" + (f"; {hint}" if hint else ""))

    def refuse(self, name: str, message: str) -> None:
        """Add a problem; `message` completes the sentence that starts with the name. Only the first of a name is kept."""
        self._problems.setdefault(name, Problem(name, message))

    def check(self, place: ClusterPlace) -> ClusterPlace:
        """The place with all conclusions and warnings. Raises: ConfigError with all problems."""
        if self._problems:
            raise ConfigError(tuple(self._problems.values()))
        return replace(place, conclusions=tuple(self.conclusions), warnings=tuple(self.warnings))

    def workers_for(self, promised: int, *, source: str) -> int:
        """One worker per GPU that is promised and not hidden; 0: count the GPUs instead."""
        mask = visible_gpus(self.environment)
        workers, why = promised, f", one for each GPU ({source})"
        if mask is not None and mask[1] < promised:
            workers, why = mask[1], f": of {count(promised, 'GPU')} ({source}) the rest is hidden by {self.show(mask[0])}"
        self.conclusions.append(f"{count(workers, 'worker')}{why}")
        return workers


def as_whole(text: str) -> int | None:
    """A number of decimal digits only, small enough for a count or a time; else None."""
    return int(text) if _WHOLE.fullmatch(text) else None


def as_ip(text: str) -> IPv4Address | IPv6Address | None:
    """None for any other text, as a name."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that hides GPUs from processes, and how many it leaves; None if none is set."""
    for name in _MASKS:
        if name in environment:
            items = [item.strip() for item in environment[name].split(",")]
            return name, sum(item not in ("", "-1", "NoDevFiles") for item in items)
    return None


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
