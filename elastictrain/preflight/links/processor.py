"""Whether a stream was slow for want of a processor, which says nothing about the network."""

import time
from collections.abc import Callable
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def read_waited_s() -> float | None:
    """How long this thread has been ready to run and had no processor; None if the kernel does not tell.

    Source: Documentation/scheduler/sched-stats.rst of Linux, /proc/<pid>/schedstat.
    """
    try:
        return 1e-9 * int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class ProcessorWait:
    """Of one thread, from its making on."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, read: Callable[[], float | None] = read_waited_s
    ) -> None:
        self._clock = clock
        self._read = read
        self._began = clock()
        self._before = read()

    def part(self) -> float:
        """From 0 to 1: the part of the time that it waited for a processor. What is unknown counts as none."""
        now, passed_s = self._read(), self._clock() - self._began
        if now is None or self._before is None or passed_s <= 0:
            return 0.0
        return min(1.0, max(0.0, (now - self._before) / passed_s))
