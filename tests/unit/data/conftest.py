from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastictrain.data.encoding import Encoder
from elastictrain.data.index import TokenIndex
from elastictrain.data.prepare import plan_digest, prepare
from elastictrain.data.sources import discover
from elastictrain.data.tokenizer import ByteTokenizer
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError
from elastictrain.storage.store import Bytes, ObjectInfo, ObjectWriter, Store


class MemoryStore:
    """A store in a dictionary, which counts what is read and streamed and can be told to break after so many writes."""

    def __init__(self, url: str = "memory://tokens") -> None:
        self.objects: dict[str, bytes] = {}
        self.bytes_read = 0
        self.streams = 0
        self.writes_left = -1
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def _spend(self) -> None:
        if self.writes_left == 0:
            raise KeyboardInterrupt
        self.writes_left -= 1

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        if key not in self.objects:
            raise ObjectNotFoundError(f"{self._url}/{key} does not exist")
        data = self.objects[key][start:end]
        self.bytes_read += len(data)
        return data

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        # Short on purpose now and then: callers must go on.
        data = self.read(key, start=start, end=start + max(1, len(buffer) // 2 + 1))
        size = min(len(data), len(buffer))
        buffer[:size] = data[:size]
        return size

    def write(self, key: str, data: Bytes) -> None:
        self._spend()
        self.objects[key] = bytes(data)

    def create(self, key: str, data: Bytes) -> None:
        if key in self.objects:
            raise ObjectExistsError(f"{self._url}/{key} exists")
        self.write(key, data)

    @contextmanager
    def open_writer(self, key: str) -> Iterator[ObjectWriter]:
        store = self
        self.streams += 1

        class Writer:
            def __init__(self) -> None:
                self.data = bytearray()

            def write(self, data: Bytes) -> None:
                store._spend()
                self.data += data

        writer = Writer()
        yield writer
        self.objects[key] = bytes(writer.data)

    def stat(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise ObjectNotFoundError(f"{self._url}/{key} does not exist")
        return ObjectInfo(key, len(self.objects[key]), 0.0)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key in sorted(self.objects):
            if not prefix or key.startswith(f"{prefix}/"):
                yield self.stat(key)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def prepare_bytes(tmp_path: Path) -> Callable[..., TokenIndex]:
    """Puts one text into token files of a store, with the byte tokenizer."""

    def make(store: Store, text: bytes, *, shard_tokens: int = 100) -> TokenIndex:
        source = tmp_path / "source.txt"
        source.write_bytes(text)
        documents = discover([str(source)], patterns=[])
        encoder = Encoder(ByteTokenizer())
        index, _ = prepare(
            documents,
            plan=plan_digest(documents, encoder=encoder, shard_tokens=shard_tokens),
            store=store,
            encoder=encoder,
            shard_tokens=shard_tokens,
        )
        return index

    return make
