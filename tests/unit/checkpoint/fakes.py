"""A store in a dictionary, to which faults can be added, and checkpointers over it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError
from elastictrain.events import Event
from elastictrain.storage.store import Bytes, ObjectInfo

_NOTHING = JobMemory()


class KilledError(BaseException):
    """The process is gone: no handler of errors may run."""


def nothing(operation: str, key: str) -> None:
    """The hook of a store without faults."""


@dataclass
class FakeStore:
    """Objects in `objects`; `before(operation, key)` is called first and may raise."""

    objects: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[str, str], None] = nothing
    url: str = "fake://run"

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        self.before("read", key)
        return self._at(key)[start:end]

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        self.before("read", key)
        data = self._at(key)[start : start + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def write(self, key: str, data: Bytes) -> None:
        self.before("write", key)
        self.objects[key] = bytes(data)

    def create(self, key: str, data: Bytes) -> None:
        self.before("create", key)
        if key in self.objects:
            raise ObjectExistsError(f"{self.url}/{key} exists")
        self.objects[key] = bytes(data)

    @contextmanager
    def open_writer(self, key: str) -> Iterator["FakeWriter"]:
        self.before("open", key)
        writer = FakeWriter(self, key)
        yield writer
        self.before("close", key)
        self.objects[key] = bytes(writer.data)

    def stat(self, key: str) -> ObjectInfo:
        self.before("stat", key)
        return ObjectInfo(key, len(self._at(key)), 0.0)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.before("list", prefix)
        folder = f"{prefix}/" if prefix else ""
        return iter([ObjectInfo(key, len(data), 0.0) for key, data in sorted(self.objects.items()) if key.startswith(folder)])

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.objects.pop(key, None)

    def _at(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectNotFoundError(f"{self.url}/{key} does not exist")
        return self.objects[key]


@dataclass
class FakeWriter:
    """An object under construction."""

    store: FakeStore
    key: str
    data: bytearray = field(default_factory=bytearray)

    def write(self, data: Bytes) -> None:
        self.store.before("append", self.key)
        self.data += data


@dataclass
class Bench:
    """A store and the events of the checkpointers over it."""

    store: FakeStore = field(default_factory=FakeStore)
    events: list[Event] = field(default_factory=list)

    def checkpointer(self, incarnation: str = "inc1", *, job: JobMemory = _NOTHING, **options: object) -> Checkpointer:
        """One of a world of one."""
        return Checkpointer(
            self.store,
            options=CheckpointGroup(**options),  # type: ignore[arg-type]
            group=None,
            rank=0,
            world_size=1,
            incarnation=incarnation,
            config_digest="digest",
            record=self.events.append,
            job=job,
            clock=lambda: 1000.0,
        )

    def files(self) -> Mapping[str, int]:
        """Keys and sizes."""
        return {key: len(data) for key, data in self.store.objects.items()}

    def folders(self) -> set[str]:
        """Names of the folders that hold anything."""
        return {key.split("/")[1] for key in self.store.objects if key.count("/") == 2}
