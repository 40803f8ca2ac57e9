"""What a launcher knows of where it is, and the reader with which it finds that out from its environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from elastictrain.errors import ConfigError, Problem

_WHOLE = re.compile(r"[0-9]{1,18}")
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """What the environment says of this host and its job."""

    kind: Literal["slurm", "kubernetes", "runai", "vast", "plain"]
    role: Literal["launcher", "idle"] = "launcher"
    """Of several tasks that the cluster started on this host one is the launcher. The others are idle: they wait for it to end,
    and end with it."""

    order: int = -1  # this host's number among the cluster's hosts; -1 where it does not number them
    num_hosts: int = 0  # hosts that the cluster promised; 0 if unknown
    processes: int = 0  # workers of this host; 0 for as many as it has GPUs
    address: str = ""  # the address at which the other hosts reach this one; empty: the one from which the kernel sends to them
    peers: tuple[str, ...] = ()
    deadline: float | None = None  # Unix time at which the cluster ends the job, if it says so
    job: str = ""  # the cluster's name for the job; empty if unknown
    conclusions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what is probably not meant, and what to do about it


class EnvironmentReader:
    """Reads the variables of an environment. Collects what is wrong with them, and what is concluded from them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.conclusions: list[str] = []
        self.warnings: list[str] = []
        self._problems: dict[str, Problem] = {}

    def first(self, *names: str) -> str:
        """The first of the names that is set; empty if none is."""
        return next((name for name in names if name in self.environment), "")

    def text(self, *names: str) -> str:
        """The value of the first of the names that is set; empty if none is."""
        return self.environment.get(self.first(*names), "")

    def whole(self, *names: str, least: int = 0) -> int | None:
        """The first of the names that is set, as a number; None if none is set, or if it is no such number (a problem)."""
        name = self.first(*names)
        if not name:
            return None
        number = as_whole(self.environment[name])
        if number is None or number < least:
            self.require(name, f"a whole number >= {least}")
            return None
        return number

    def show(self, *names: str) -> str:
        """`NAME=value` of the first of the names that is set."""
        name = self.first(*names)
        return f"{name}={self.environment[name]}" if name else ""

    def require(self, name: str, expected: str, *, hint: str = "") -> None:
        """One more problem: a variable must be what is expected, and is not."""
        found = "not"
        if name in self.environment:
            text = self.environment[name]
            found = repr(text) if as_whole(text) is None else text
        self.refuse(name, f"must be {expected} in the environment, but is {found}" + (f"; {hint}" if hint else ""))

    def refuse(self, name: str, message: str) -> None:
        """One more problem; `message` completes the sentence that starts with the name. Only the first of a name is told."""
        self._problems.setdefault(name, Problem(name, message))

    def check(self, place: ClusterPlace) -> ClusterPlace:
        """The place with all conclusions and warnings. Raises: ConfigError with every problem so far, if there is one."""
        if self._problems:
            raise ConfigError(tuple(self._problems.values()))
        return replace(place, conclusions=tuple(self.conclusions), warnings=tuple(self.warnings))

    def workers_for(self, promised: int, *, source: str) -> int:
        """One worker for each GPU that is promised and not hidden; 0: the GPUs are to be asked."""
        mask = visible_gpus(self.environment)
        workers, why = promised, f", one for each GPU ({source})"
        if mask is not None and mask[1] < promised:
            workers, why = mask[1], f": of {count(promised, 'GPU')} ({source}) the rest is hidden by {self.show(mask[0])}"
        self.conclusions.append(f"{count(workers, 'worker')}{why}")
        return workers


def as_whole(text: str) -> int | None:
    """A number of decimal digits and nothing else, small enough to be a count or a time."""
    return int(text) if _WHOLE.fullmatch(text) else None


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that hides GPUs from processes, and how many it leaves; None where no GPU is hidden."""
    for name in _MASKS:
        if name in environment:
            items = [item.strip() for item in environment[name].split(",")]
            return name, sum(item not in ("", "-1", "NoDevFiles") for item in items)
    return None


def count(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
