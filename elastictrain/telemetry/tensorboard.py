"""TensorBoard's scalars, written on a thread of their own: the trainer never waits, and a failure never ends the run."""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastictrain.storage.store import Store
from elastictrain.telemetry.eventfile import EventFile, open_event_file, purge_record, scalars_record, version_record

logger = logging.getLogger(__name__)


class ScalarWriter(Protocol):
    """Takes the scalars of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Note values at a step; returns at once."""

    def close(self, *, timeout_s: float) -> None:
        """Write what is waiting, for at most `timeout_s`."""


class NoScalars:
    """For ranks that do not speak, and for `telemetry.tensorboard=false`."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing."""

    def close(self, *, timeout_s: float) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    values: Mapping[str, float]
    wall_time: float


class BackgroundScalars:
    """Writes scalars from a thread. What does not fit into the queue is dropped; after a failure everything is."""

    def __init__(
        self,
        open_file: Callable[[], EventFile],
        *,
        purge_step: int | None,
        flush_s: float,
        clock: Callable[[], float] = time.time,
        max_waiting: int = 1000,
    ) -> None:
        self._open_file = open_file
        self._purge_step = purge_step
        self._flush_s = flush_s
        self._clock = clock
        self._waiting: queue.Queue[_Point | None] = queue.Queue(max_waiting)
        self._dropped = 0
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values of a step."""
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait(_Point(step, dict(values), self._clock()))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("TensorBoard's storage is too slow: points are being dropped, the first at step %d", step)

    def close(self, *, timeout_s: float) -> None:
        """End the thread after what is queued; a store that hangs costs `timeout_s` and no more."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            logger.warning("TensorBoard's storage is stuck: the last points are lost")
            return
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("TensorBoard's storage did not finish within %g s: the last points may be lost", timeout_s)

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001 - the edge of a thread; curves are not worth a run
            self._failed.set()
            logger.warning("TensorBoard is off for the rest of this incarnation: %s: %s", type(error).__name__, error)
            # Whoever waits in `close` for room must not wait in vain.
            while not self._waiting.empty():
                self._waiting.get_nowait()

    def _write_all(self) -> None:
        file = self._open_file()
        file.append(version_record(wall_time=self._clock()))
        if self._purge_step is not None:
            file.append(purge_record(wall_time=self._clock(), step=self._purge_step))
        next_flush_s = time.monotonic()
        while True:
            try:
                point = self._waiting.get(timeout=max(0.0, next_flush_s - time.monotonic()))
            except queue.Empty:
                file.flush()
                next_flush_s = time.monotonic() + self._flush_s
                continue
            if point is None:
                file.flush()
                return
            file.append(scalars_record(point.values, wall_time=point.wall_time, step=point.step))


def event_file_key(*, wall_time: float, host: str, process: int) -> str:
    """Key of this process's event file. TensorBoard reads a folder's files in name order, so the time comes first."""
    return f"tensorboard/events.out.tfevents.{int(wall_time):010d}.{host}.{process}"


def open_scalars(
    store: Store, *, purge_step: int | None, flush_s: float, clock: Callable[[], float] = time.time
) -> ScalarWriter:
    """Scalars to <run.dir>/tensorboard/; `store` is rooted at run.dir, wherever that is.

    `purge_step`: on a resume, the first step that is written again (steps committed + 1); TensorBoard then forgets what an
    earlier incarnation wrote of it and of later steps.
    """
    key = event_file_key(wall_time=clock(), host=socket.gethostname(), process=os.getpid())
    return BackgroundScalars(
        lambda: open_event_file(store, key=key, clock=clock), purge_step=purge_step, flush_s=flush_s, clock=clock
    )
