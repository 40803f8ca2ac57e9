"""Rates of bytes between two hosts, and whether the processor or the network limited them."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastictrain.preflight.links.wire import TRAILER, Line, LineError

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


LEAST_SLICE_S = 0.08
"""A slice this long smooths what a burst allowance or a buffer lets through; a shorter total counts as one."""


class Meter:
    """Counts bytes as they come, and keeps the last few in `tail`.

    The best rate is that of the best stretch: a busy processor makes a stretch slower, never faster.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.tail = b""
        self._marks: list[tuple[float, int]] = []
        self._last = (0.0, 0)

    def add(self, count: int, *, now_s: float) -> None:
        """So many more have come."""
        self.num_bytes += count
        if not self._marks or now_s - self._marks[-1][0] >= LEAST_SLICE_S / 8:
            self._marks.append((now_s, self.num_bytes))
        self._last = (now_s, self.num_bytes)

    def seconds(self) -> float:
        """From the first bytes to the last."""
        return self._last[0] - self._marks[0][0] if self._marks else 0.0

    def best_bytes_per_s(self) -> float:
        """Over stretches of at least `LEAST_SLICE_S`; 0 if next to nothing came."""
        marks = [*self._marks, self._last] if self._marks else []
        best, left = 0.0, 0
        for right in range(1, len(marks)):
            while left + 1 < right and marks[right][0] - marks[left + 1][0] >= LEAST_SLICE_S:
                left += 1
            length_s = marks[right][0] - marks[left][0]
            if length_s >= LEAST_SLICE_S:
                best = max(best, (marks[right][1] - marks[left][1]) / length_s)
        if best == 0.0 and self.seconds() > 0:
            best = (self.num_bytes - self._marks[0][1]) / self.seconds()
        return best


def drain(line: Line, buffer: memoryview, *, clock: Callable[[], float], limit_s: float, idle_s: float) -> Meter:
    """Read until the other side ends or breaks off, `limit_s` are over, or nothing has come for `idle_s`."""
    meter, deadline = Meter(), clock() + limit_s
    with suppress(LineError):
        while (left_s := deadline - clock()) > 0:
            count = line.receive_into(buffer, limit_s=min(idle_s, left_s))
            if not count:
                break
            meter.add(count, now_s=clock())
            meter.tail = (meter.tail + bytes(buffer[max(0, count - TRAILER.size) : count]))[-TRAILER.size :]
    return meter
