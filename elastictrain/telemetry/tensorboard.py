"""TensorBoard's scalars, texts and hparams, written to the run folder through the same kind of log as events."""

import os
import socket
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

from elastictrain.config.constraints import flatten
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


def encode_summary(*values: object, time: float, step: int) -> bytes:
    """An event with values of TensorBoard's kind."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return encode_event(wall_time=time, step=step, summary=Summary(value=values))


def text_value(tag: str, text: str) -> object:
    """A text, in Markdown, for TensorBoard's page of texts."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.tensorflow_stub.dtypes import string
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype=string.as_datatype_enum, string_val=[text.encode()])
    return Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))


def hparams_values(config: Mapping[str, object], *, name: str, time: float) -> list[object]:
    """The configuration as hparams, with which TensorBoard compares runs."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    flat = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in flatten(config)}
    return list(hparams_pb(flat, trial_id=name, start_time_secs=time).value)


class TensorBoardLogger:
    """Writes to <run.dir>/tensorboard/."""

    def open(self, run: LoggedRun) -> None:
        """Writes nothing yet: the first point opens the file. Raises: StorageError."""
        # The slow imports are done before the first point.
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._run = run
        # TensorBoard drops this step and later ones of earlier generations: they are written again.
        self._start = partial(encode_event, step=run.first_step, session_log=SessionLog(status=SessionLog.START))
        self._log: AppendLog | None = None
        self._first = next(iter(run.store.list("tensorboard")), None) is None

    def log(self, point: MetricPoint) -> None:
        """The first call opens the file of this start, which begins with the texts. Raises: StorageError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._log is None:
            # TensorBoard reads a folder's files in name order, so the time comes first.
            key = f"tensorboard/events.out.tfevents.{int(point.time):010d}.{socket.gethostname()}.{os.getpid()}"
            self._log = open_append_log(self._run.store, key, flush_s=self._run.flush_s, close_s=self._run.close_s)
            self._log.append(
                encode_event(wall_time=point.time, file_version="brain.Event:2")
                + self._start(wall_time=point.time)
                + self._texts(point.time)
            )
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
        self._log.append(encode_summary(*values, time=point.time, step=point.step))

    def _texts(self, time: float) -> bytes:
        """What stands once in each start's file; hparams in that of the first one alone."""
        run = self._run
        workers = f"{run.world_size} worker{'s' if run.world_size > 1 else ''}"
        texts: list[Any] = [text_value("run/start", f"{run.generation} begins with step {run.first_step}, with {workers}")]
        lines = "".join(f"    {key}={value}\n" for key, value in flatten(run.config))
        texts.append(text_value("run/configuration", lines))
        hparams = hparams_values(run.config, name=run.name, time=time) if self._first else []
        return encode_summary(*texts, *hparams, time=time, step=run.first_step)

    def close(self, *, complete: bool) -> None:
        if self._log is not None:
            self._log.close()
