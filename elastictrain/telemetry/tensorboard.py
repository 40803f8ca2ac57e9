"""TensorBoard's scalars, written to the run folder through the same kind of log as events, which never fails the trainer."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import psutil
import torch

from elastictrain.events import AppendLog
from elastictrain.storage.appendlog import LostLog, open_append_log
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

GB = 1e9


def encode_event(**fields: object) -> bytes:
    """One event in the frame of the TFRecord format: length, its checksum, the event, its checksum."""
    # Imported here: it takes 0.4 s, and only the rank that writes needs it.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    payload: bytes = Event(**fields).SerializeToString()
    header = struct.pack("<Q", len(payload))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (header, payload)]
    return b"".join((header, checksums[0], payload, checksums[1]))


class ScalarWriter:
    """Writes scalars to <run.dir>/tensorboard/. Scalars that cannot be written are lost: curves are not worth a run."""

    def __init__(
        self, store: Store, *, purge_step: int, flush_s: float, close_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`store` is rooted at run.dir; `clock` is wall time. `flush_s` and `close_s` are those of the log. `purge_step`: the
        first step that is written again (steps committed + 1); TensorBoard drops this step and later ones of earlier
        generations."""
        self._clock = clock
        self._open_log = partial(self._begin, store, purge_step=purge_step, flush_s=flush_s, close_s=close_s)
        self._log: AppendLog | None = None
        # The slow imports finish in the background before the first point, so no step waits for them.
        threading.Thread(target=encode_event, name="tensorboard", daemon=True).start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._log is None:
            try:
                self._log = self._open_log()
            except Exception as error:  # noqa: BLE001  a folder that takes no file, or an installation without its parts
                logger.warning("TensorBoard is off for the rest of this generation: %s: %s", type(error).__name__, error)
                self._log = LostLog()
        if not isinstance(self._log, LostLog):
            from tensorboard.compat.proto.summary_pb2 import Summary

            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            self._log.append(encode_event(wall_time=self._clock(), step=step, summary=summary))

    def close(self) -> None:
        """Write pending scalars, within the log's limit."""
        if self._log is not None:
            self._log.close()

    def _begin(self, store: Store, *, purge_step: int, flush_s: float, close_s: float) -> AppendLog:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        now = self._clock()
        # TensorBoard reads a folder's files in name order, so the time comes first.
        key = f"tensorboard/events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        version = encode_event(wall_time=now, file_version="brain.Event:2")
        start = encode_event(wall_time=now, step=purge_step, session_log=SessionLog(status=SessionLog.START))
        log = open_append_log(store, key, flush_s=flush_s, close_s=close_s)
        log.append(version + start)
        return log


def host_scalars(device: torch.device) -> Mapping[str, float]:
    """Tag to value for this host and its device now; percentages and device memory (its peak) are since the previous call.

    The first call returns a meaningless processor share of 0. GB are 10^9 bytes. Host memory excludes caches that the system
    would free. `device_busy_percent` is the share of the last moment in which a kernel ran; it needs the extra `gpu`. A call
    takes well under a millisecond.
    """
    memory = psutil.virtual_memory()
    values = {
        "system/cpu_percent": float(psutil.cpu_percent(interval=None)),
        "system/memory_gb": float(memory.total - memory.available) / GB,
    }
    if device.type != "cuda":
        return values
    values["system/device_memory_gb"] = torch.cuda.max_memory_allocated(device) / GB
    torch.cuda.reset_peak_memory_stats(device)
    if find_spec("pynvml") is not None:
        # A MIG slice, or a driver without its management library, does not report this.
        with suppress(RuntimeError):
            values["system/device_busy_percent"] = float(torch.cuda.utilization(device))
    return values
