"""TensorBoard's scalars, written on a thread of their own: the trainer never waits, and a failure never ends the run."""

import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import psutil
import torch

from elastictrain.storage.local import LocalStore
from elastictrain.storage.posix import write_all
from elastictrain.storage.store import Store
from elastictrain.telemetry.progress import Reading

logger = logging.getLogger(__name__)

VERSION = "brain.Event:2"

GB = 1e9


def encode_event(**fields: object) -> bytes:
    """One event in the frame that TensorBoard reads: length, its checksum, the event, its checksum.

    Source: the TFRecord format.
    """
    # Imported here: it takes 0.4 s, and only the rank that writes needs it, on the writer's own thread.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    payload: bytes = Event(**fields).SerializeToString()
    header = struct.pack("<Q", len(payload))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (header, payload)]
    return b"".join((header, checksums[0], payload, checksums[1]))


class LocalEventFile:
    """A file that is appended to: TensorBoard keeps reading an open one, so it must not be replaced."""

    def __init__(self, store: LocalStore, *, key: str) -> None:
        """Raises: OSError; IrregularFileError."""
        os.close(store.open_appended(key))
        self._store = store
        self._key = key

    def append(self, record: bytes) -> None:
        """One write, so that the death of this process leaves whole records, which a reader sees at once."""
        descriptor = self._store.open_appended(self._key, make=False)
        try:
            write_all(descriptor, memoryview(record))
        finally:
            os.close(descriptor)

    def flush(self) -> None:
        """Every append is visible at once."""


class StoredEventFile:
    """Objects that are written anew as they grow; a full one is left for good, and the next begun.

    An object store cannot append. The bound keeps the bytes that are sent again in proportion.
    """

    def __init__(self, store: Store, *, key: str, clock: Callable[[], float], part_bytes: int = 1 << 20) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self._part_bytes = part_bytes
        self._part = 0
        self._content = bytearray()
        self._changed = False

    def append(self, record: bytes) -> None:
        """Add to the part at hand; leave it when it is full."""
        if len(self._content) >= self._part_bytes:
            self.flush()
            self._part += 1
            self._content = bytearray(encode_event(wall_time=self._clock(), file_version=VERSION))
        self._content += record
        self._changed = True

    def flush(self) -> None:
        """Write the part at hand, if it changed."""
        if self._changed:
            self._store.write(f"{self._key}.{self._part:04d}", bytes(self._content))
            self._changed = False


EventFile = LocalEventFile | StoredEventFile


class ScalarWriter:
    """Writes scalars to <run.dir>/tensorboard/ from a thread.

    What does not fit into the queue is dropped; after a failure everything is.
    """

    def __init__(
        self,
        store: Store,
        *,
        purge_step: int | None,
        flush_s: float,
        clock: Callable[[], float] = time.time,
        max_waiting: int = 1000,
    ) -> None:
        """`store` is rooted at run.dir, wherever that is; `clock` is wall time.

        `purge_step`: on a resume, the first step that is written again (steps committed + 1); TensorBoard then forgets what
        an earlier generation wrote of it and of later steps.
        """
        self._store = store
        self._purge_step = purge_step
        self._flush_s = flush_s
        self._clock = clock
        # TensorBoard reads a folder's files in name order, so the time comes first.
        self._key = f"tensorboard/events.out.tfevents.{int(clock()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._waiting: queue.Queue[tuple[int, Mapping[str, float], float] | None] = queue.Queue(max_waiting)
        self._dropped = 0
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Note values at a step; returns at once."""
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait((step, dict(values), self._clock()))
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
            logger.warning("TensorBoard is off for the rest of this generation: %s: %s", type(error).__name__, error)
            # Whoever waits in `close` for room must not wait in vain.
            while not self._waiting.empty():
                self._waiting.get_nowait()

    def _write_all(self) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        file: EventFile
        if isinstance(self._store, LocalStore):
            file = LocalEventFile(self._store, key=self._key)
        else:
            file = StoredEventFile(self._store, key=self._key, clock=self._clock)
        file.append(encode_event(wall_time=self._clock(), file_version=VERSION))
        if self._purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            file.append(encode_event(wall_time=self._clock(), step=self._purge_step, session_log=start))
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
            step, values, wall_time = point
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            file.append(encode_event(wall_time=wall_time, step=step, summary=summary))


def scalars_of(reading: Reading) -> Mapping[str, float]:
    """Tag to value for one logged step; what is not known has no tag. TensorBoard sorts by tag and unfolds the first groups."""
    values: dict[str, float | None] = {
        "loss/train": reading.loss,
        "optimizer/lr": reading.lr,
        "optimizer/grad_norm": reading.grad_norm,
        "optimizer/skipped": float(reading.skipped),
        "speed/tokens_per_s": reading.tokens_per_s,
        "speed/step_s": reading.step_s,
        "speed/mfu": reading.mfu,
    }
    return {tag: value for tag, value in values.items() if value is not None}


class HostProbe:
    """Looks at the processor and memory of this host and its device; one look costs well under a millisecond."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # psutil measures between two calls and answers the first with a meaningless 0.
        psutil.cpu_percent(interval=None)

    def scalars(self) -> Mapping[str, float]:
        """Tag to value now; percentages and device memory (its peak) are since the call before. GB are 10^9 bytes.

        A host's memory is without caches that the system would give back. `device_busy_percent` is the share of the last
        moment in which a kernel ran; it needs the extra `gpu`.
        """
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_percent": float(psutil.cpu_percent(interval=None)),
            "system/memory_gb": float(memory.total - memory.available) / GB,
        }
        if self._device.type != "cuda":
            return values
        values["system/device_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / GB
        torch.cuda.reset_peak_memory_stats(self._device)
        if find_spec("pynvml") is not None:
            try:
                values["system/device_busy_percent"] = float(torch.cuda.utilization(self._device))
            except RuntimeError:
                # A slice of a device, or a driver without its management library, does not tell.
                return values
        return values
