"""TensorBoard's scalars, written to the run folder through the same kind of log as events."""

import os
import socket
import struct
from functools import partial

from elastictrain.events import AppendLog
from elastictrain.storage.appendlog import open_append_log
from elastictrain.telemetry.loggers import LoggedRun, MetricPoint


def encode_event(**fields: object) -> bytes:
    """One event in the frame of the TFRecord format: length, its checksum, the event, its checksum."""
    # Imported here: it takes 0.4 s, and only the rank that writes needs it.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    payload: bytes = Event(**fields).SerializeToString()
    header = struct.pack("<Q", len(payload))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (header, payload)]
    return b"".join((header, checksums[0], payload, checksums[1]))


class TensorBoardLogger:
    """Writes scalars to <run.dir>/tensorboard/."""

    def open(self, run: LoggedRun) -> None:
        # The slow imports are done before the first point.
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._run = run
        # TensorBoard drops this step and later ones of earlier generations: they are written again.
        self._start = partial(encode_event, step=run.first_step, session_log=SessionLog(status=SessionLog.START))
        self._log: AppendLog | None = None

    def log(self, point: MetricPoint) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._log is None:
            # TensorBoard reads a folder's files in name order, so the time comes first.
            key = f"tensorboard/events.out.tfevents.{int(point.time):010d}.{socket.gethostname()}.{os.getpid()}"
            self._log = open_append_log(self._run.store, key, flush_s=self._run.flush_s, close_s=self._run.close_s)
            self._log.append(
                encode_event(wall_time=point.time, file_version="brain.Event:2") + self._start(wall_time=point.time)
            )
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()])
        self._log.append(encode_event(wall_time=point.time, step=point.step, summary=summary))

    def close(self, *, complete: bool) -> None:
        if self._log is not None:
            self._log.close()
