"""A store in a dictionary, to which faults can be added."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastictrain.errors import ObjectExistsError, ObjectNotFoundError
from elastictrain.storage.store import Bytes, ObjectInfo


class KilledError(BaseException):
    """The process is gone: no handler of errors may run."""


def nothing(operation: str, key: str) -> None:
    """The hook of a store without faults."""


@dataclass
class MemoryStore:
    """Objects in `objects`; `before(operation, key)` is called first and may raise, `after` once an object is created."""

    objects: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[str, str], None] = nothing
    after: Callable[[str, str], None] = nothing
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
        self.after("create", key)

    @contextmanager
    def open_writer(self, key: str) -> Iterator["MemoryWriter"]:
        self.before("open", key)
        writer = MemoryWriter(self, key)
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
class MemoryWriter:
    """An object under construction."""

    store: MemoryStore
    key: str
    data: bytearray = field(default_factory=bytearray)

    def write(self, data: Bytes) -> None:
        self.store.before("append", self.key)
        self.data += data
