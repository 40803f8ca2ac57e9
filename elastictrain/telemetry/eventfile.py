"""Files of TensorBoard events that only grow, on a local disk and on an object store."""

import os
import struct
from collections.abc import Callable, Mapping
from typing import Protocol

from elastictrain.storage.local import LocalStore
from elastictrain.storage.posix import write_all
from elastictrain.storage.store import Store

VERSION = "brain.Event:2"


class EventFile(Protocol):
    """Where encoded events go."""

    def append(self, record: bytes) -> None:
        """Add one framed event."""

    def flush(self) -> None:
        """Make what was appended visible to a reader."""


def encode_record(payload: bytes) -> bytes:
    """One event in the frame that TensorBoard reads: length, its checksum, the event, its checksum.

    Source: the TFRecord format.
    """
    # Imported here: it takes 0.4 s, and only the rank that writes needs it, on the writer's own thread.
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    header = struct.pack("<Q", len(payload))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (header, payload)]
    return header + checksums[0] + payload + checksums[1]


def version_record(*, wall_time: float) -> bytes:
    """The first record of every file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return encode_record(Event(wall_time=wall_time, file_version=VERSION).SerializeToString())


def purge_record(*, wall_time: float, step: int) -> bytes:
    """Tells TensorBoard to forget what earlier files say about `step` and later steps."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    return encode_record(Event(wall_time=wall_time, step=step, session_log=start).SerializeToString())


def scalars_record(values: Mapping[str, float], *, wall_time: float, step: int) -> bytes:
    """All scalars of one step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    return encode_record(Event(wall_time=wall_time, step=step, summary=summary).SerializeToString())


class LocalEventFile:
    """A file that is appended to: TensorBoard keeps reading an open one, so it must not be replaced."""

    def __init__(self, store: LocalStore, *, key: str) -> None:
        """Raises: OSError; IrregularFileError."""
        os.close(store.open_appended(key))
        self._store = store
        self._key = key

    def append(self, record: bytes) -> None:
        """One write, so that the death of this process leaves whole records."""
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
            self._content = bytearray(version_record(wall_time=self._clock()))
        self._content += record
        self._changed = True

    def flush(self) -> None:
        """Write the part at hand, if it changed."""
        if self._changed:
            self._store.write(f"{self._key}.{self._part:04d}", bytes(self._content))
            self._changed = False


def open_event_file(store: Store, *, key: str, clock: Callable[[], float]) -> EventFile:
    """The event file of that key under `store`; `clock` is wall time."""
    if isinstance(store, LocalStore):
        return LocalEventFile(store, key=key)
    return StoredEventFile(store, key=key, clock=clock)
