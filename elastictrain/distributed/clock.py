"""What a device, or the host, has spent on its work."""

import time
from typing import Any, Protocol, TypeVar

import torch

M = TypeVar("M")


class Clock(Protocol[M]):
    def now(self) -> M:
        """A mark of this moment."""

    def between_s(self, first: M, second: M, /) -> float:
        """Seconds between two marks that have passed."""

    def release(self, marks: list[M], /) -> None:
        """The marks are not used any more."""


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def between_s(self, first: float, second: float, /) -> float:
        return second - first

    def release(self, marks: list[float], /) -> None: ...


class DeviceClock:
    """Marks in the device's stream: a phase lasts as long as the device works on it, or is kept waiting in it by the host."""

    def __init__(self, device: torch.device) -> None:
        # Looked up once: for an event that is recorded in "the present stream" torch makes an object of it each time.
        self._stream = torch.cuda.current_stream(device)
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def between_s(self, first: torch.cuda.Event, second: torch.cuda.Event, /) -> float:
        return float(first.elapsed_time(second)) / 1000

    def release(self, marks: list[torch.cuda.Event], /) -> None:
        self._free += marks


def clock_of(device: torch.device) -> Clock[Any]:
    """That of the thread's present stream on a GPU, else the host's."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
