"""Where the time of a start goes: from the command to the first step, each moment belongs to one part."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.identity import LAUNCHER, RESTARTED

ORDERED = "ELASTICTRAIN_ORDERED"  # when the launcher ordered the workers, in seconds since the host has booted


@dataclass(slots=True)
class StartTimes:
    """`seconds` by part, in the order of time. One thread ends one part after the other; the next one begins there."""

    seconds: dict[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)  # what a launcher did before this process
    clock: Callable[[], float] = time.monotonic
    compile_s: float = field(default=0.0, init=False)  # of compilers, within the parts
    _since_s: float = field(init=False)
    _compiles_since_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    def end_part(self, name: str) -> None:
        now_s = self.clock()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now_s - self._since_s, 4)
        self._since_s = now_s

    def compiling(self, *, begins: bool) -> None:
        now_s = self.clock()
        if self._compiles_since_s is not None:
            self.compile_s += now_s - self._compiles_since_s
        self._compiles_since_s = now_s if begins else None

    def of_first_step(self) -> dict[str, float]:
        """All since the command, once the part `first_step` is over: compilation is a part of its own."""
        compile_s = round(min(self.compile_s, self.seconds["first_step"]), 4)
        first_step_s = round(self.seconds["first_step"] - compile_s, 4)
        return {**self.before, **self.seconds, "compile": compile_s, "first_step": first_step_s}


def of_this_process(environment: Mapping[str, str], *, process: Path = Path("/proc")) -> StartTimes:
    """The times of a start that this process is for. The part `process` is over: Python has started, with its first imports."""
    now_s, before = time.clock_gettime(time.CLOCK_BOOTTIME), dict[str, float]()
    born_s = _born_s(process / "self")
    if LAUNCHER in environment and environment.get(RESTARTED) == "0":
        launched_s = _born_s(process / environment[LAUNCHER])
        with suppress(ValueError):
            ordered_s = min(float(environment.get(ORDERED, "")), born_s or now_s)
            before["launcher"] = round(ordered_s - (launched_s or ordered_s), 4)
            # Until the fork server has imported what workers need.
            before["fork_server"] = round((born_s or now_s) - ordered_s, 4)
    return StartTimes({"process": round(now_s - (born_s or now_s), 4)}, before)


def _born_s(process: Path) -> float | None:
    """When a process began, in seconds since the host has booted. Source: proc(5), field 22."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
