"""Says what a long wait is for, so that nobody takes it for a hang."""

import time
from collections.abc import Callable
from pathlib import Path

from elastictrain.fault.exits import read_stat

FIRST_S = 5.0
"""A wait that is over sooner is of no interest to anybody."""

AGAIN_S = 30.0

_PROC = Path("/proc")


class WaitNotice:
    """One wait, which begins when this is made."""

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_S

    def tell(self, what: Callable[[], str], *, until_s: float | None) -> None:
        """Call this again and again while waiting; `until_s` of the clock is when the wait is given up, if that is known."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + AGAIN_S
        limit = "" if until_s is None else f", {max(0.0, until_s - now_s):.0f} s more at most"
        self._say(f"waiting for {what()} ({now_s - self._began_s:.0f} s so far{limit})")


def describe_process(pid: int, *, proc: Path = _PROC) -> str:
    """A process by its number, and what keeps it from running, if anything does."""
    stat = read_stat(proc / str(pid))
    if stat is None:
        return f"process {pid}, which is gone"
    if stat.state in "Tt":
        return f"process {pid}, which is stopped; `kill -CONT {pid}` resumes it"
    return f"process {pid}"
