"""Store on an object store, and `Backend`: the single requests that it needs from a service.

A write is one request (or one completed multipart upload): the service makes it atomic and durable. Each listing comes from the
service; nothing is cached.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from elastictrain.errors import ObjectExistsError, ObjectNotFoundError, TransientStorageError
from elastictrain.storage.failures import Fault, Retrying, fault_of
from elastictrain.storage.store import Bytes, ObjectInfo, check_key, folder_of

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5
_SLOWEST_BYTES_PER_S = 1 << 20
PART_BYTES = 16 << 20  # S3 takes 10,000 parts, so 160 GiB at most; some services want all parts but the last to be equal

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Requests to one service, each tried once; a path is bucket and key. A request fails with whatever the client raises."""

    parallel: int  # concurrent requests for one object; 1 if parts of an upload must come in order and only once

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        """Bytes [start, end)."""

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        """Create or replace; with a `mark`, which `describe` returns, fail if the object exists."""

    def begin(self, path: str) -> Any:
        """Begin a multipart upload, of which nothing is visible before `finish`."""

    def put_part(self, path: str, upload: Any, number: int, data: bytes) -> Any:
        """Send part `number` (from 1), all but the last of one size; return what `finish` needs. May be repeated."""

    def finish(self, path: str, upload: Any, parts: Sequence[Any]) -> None:
        """Make the object visible. Repeated after a failure only where the backend is `parallel`."""

    def abort(self, path: str, upload: Any) -> None:
        """Discard the parts."""

    def describe(self, path: str) -> tuple[ObjectInfo, str | None]:
        """Size and time (the key is the path), and the creator's mark: '' without one, None where marks are not kept."""

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """All objects whose path begins with `folder`, which ends with '/', in any order; keys are paths."""

    def remove(self, path: str) -> None:
        """Delete; an absent object may be an error."""


@dataclass(eq=False)
class RemoteStore:
    """Objects below the URL of a service. `Store` documents the methods.

    Each process has its own connections, because they do not survive a fork. On S3, Google Cloud and Azure an object keeps its
    creator's mark. Elsewhere two creators of the same bytes may both succeed, so a caller that must be the only winner writes
    unique bytes.
    """

    root: str  # the path (bucket and folder) of `url`
    _: KW_ONLY
    url: str
    backend: Callable[[], Backend]  # opens a connection
    retrying: Retrying

    def __post_init__(self) -> None:
        self._connected: tuple[int, Backend] | None = None

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """An empty range of a missing object raises ObjectNotFoundError, too; one behind the object's end is empty."""
        if end is not None and end <= start:
            self.stat(key)
            return b""

        def request(backend: Backend, path: str) -> bytes:
            try:
                return backend.get(path, start=start, end=end)
            except Exception as error:
                if fault_of(error) is Fault.RANGE:
                    return b""
                raise

        return self._try("read", key, request)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """Reads up to four parts of `PART_BYTES` at once. Raises: TransientStorageError also if it sees the object change."""
        view = buffer.cast("B")

        def fetch(offset: int) -> int:
            data = self.read(key, start=start + offset, end=start + min(offset + PART_BYTES, len(view)))
            view[offset : offset + len(data)] = data
            return len(data)

        if len(view) <= PART_BYTES:
            return fetch(0) if len(view) else 0
        with ThreadPoolExecutor(4, thread_name_prefix="download") as pool:
            counts = list(pool.map(fetch, range(0, len(view), PART_BYTES)))
        done = sum(counts)
        # Parts after a short one are empty, unless a longer object replaced this one meanwhile.
        if any(counts[-(-done // PART_BYTES) :]):
            raise TransientStorageError(f"{self.url}/{key} changed while it was read; read it again")
        return done

    def write(self, key: str, data: Bytes) -> None:
        if memoryview(data).nbytes >= 2 * PART_BYTES:
            with self.open_writer(key) as writer:
                writer.write(data)
        else:
            self._try("write", key, lambda backend, path: backend.put(path, bytes(data)))

    def create(self, key: str, data: Bytes) -> None:
        """If the object exists, its mark (its bytes, where no marks are kept) shows whether this very call created it."""
        payload, mark = bytes(data), secrets.token_hex(16)
        try:
            self._try("create", key, lambda backend, path: backend.put(path, payload, mark=mark))
        except ObjectExistsError:
            # A request whose answer is lost may have been carried out and sent again, by `Retrying` or, unseen, by aiohttp
            # (which repeats a PUT when a connection breaks): then the object exists because this call created it.
            try:
                found = self._try("create", key, lambda backend, path: backend.describe(path)[1])
                ours = self.read(key) == payload if found is None else found == mark
            except ObjectNotFoundError:
                # A directory of this name, or an object that was deleted since.
                ours = False
            if not ours:
                raise

    @contextmanager
    def open_writer(self, key: str) -> Iterator["PartWriter"]:
        writer = PartWriter(self._backend(), self._path(key), url=f"{self.url}/{key}", retrying=self.retrying)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def stat(self, key: str) -> ObjectInfo:
        return self._try("find", key, lambda backend, path: self._relative(backend.describe(path)[0]))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = folder_of(prefix, url=self.url)
        found = self.retrying.call(
            lambda: list(self._backend().find(f"{self.root}/{folder}")), action="list", url=f"{self.url}/{folder}"
        )
        yield from sorted(map(self._relative, found), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Takes a service's error for a missing object as success."""

        def request(backend: Backend, path: str) -> None:
            try:
                backend.remove(path)
            except Exception as error:
                if fault_of(error) is not Fault.NOT_FOUND:
                    raise

        self._try("delete", key, request)

    def _path(self, key: str) -> str:
        check_key(key, url=self.url)
        return f"{self.root}/{key}"

    def _relative(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.key[len(self.root) + 1 :], info.size_bytes, info.modified)

    def _try(self, action: str, key: str, request: Callable[[Backend, str], T]) -> T:
        path = self._path(key)
        return self.retrying.call(lambda: request(self._backend(), path), action=action, url=f"{self.url}/{key}")

    def _backend(self) -> Backend:
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = (os.getpid(), self.backend())
        return self._connected[1]


class PartWriter:
    """Gathers bytes into parts and sends them in the background; `finish` or `abort` ends it.

    It holds at most `parallel` + 1 parts. An object smaller than one part is sent in one request.
    """

    def __init__(self, backend: Backend, path: str, *, url: str, retrying: Retrying) -> None:
        self._backend = backend
        self._path = path
        self._url = url
        self._retrying = retrying
        # Where parts are a stream, a failed part may be half sent and cannot be repeated. A stream that failed to close counts
        # as closed, so that a second close would pass for success.
        self._retrying_parts = retrying if backend.parallel > 1 else retrying.once()
        self._gathered = bytearray()
        self._upload: Any = None
        self._pool = ThreadPoolExecutor(backend.parallel, thread_name_prefix="upload")
        self._sending: list[Future[Any]] = []
        self._total_bytes = 0

    def write(self, data: Bytes) -> None:
        """Append; blocks while all connections are busy. Raises the error of an earlier part."""
        view = memoryview(data).cast("B")
        self._total_bytes += len(view)
        while len(self._gathered) + len(view) >= PART_BYTES:
            head = view[: PART_BYTES - len(self._gathered)]
            part = b"".join((self._gathered, head))
            self._gathered.clear()
            self._send(part)
            view = view[len(head) :]
        self._gathered += view

    def finish(self) -> None:
        """Wait for all parts, and make the object durable and visible. Raises: StorageError; the caller then calls `abort`."""
        if self._upload is None:
            data = bytes(self._gathered)
            self._retrying.call(lambda: self._backend.put(self._path, data), action="write", url=self._url)
            return
        if self._gathered:
            self._send(bytes(self._gathered))
        parts = [sending.result() for sending in self._sending]
        repeated = False

        def complete() -> None:
            """Succeeds, too, if an earlier attempt has: the object is there in its full size."""
            nonlocal repeated
            first, repeated = not repeated, True
            try:
                self._backend.finish(self._path, self._upload, parts)
            except Exception as error:
                # The service does not know a completed upload: an earlier attempt may have succeeded with its answer lost.
                lost = not first and fault_of(error) is Fault.NOT_FOUND
                if not lost or self._backend.describe(self._path)[0].size_bytes != self._total_bytes:
                    raise

        self._retrying_parts.call(complete, action="write", url=self._url)
        self._pool.shutdown()

    def abort(self) -> None:
        """Discard the parts; never raises, because it runs while another exception propagates."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload is not None:
            try:
                self._backend.abort(self._path, self._upload)
            except Exception as error:  # noqa: BLE001  see above; a rule of the bucket can remove the leftovers
                logger.warning("parts of an unfinished upload to %s may be left: %s", self._path, error)

    def _send(self, part: bytes) -> None:
        if self._upload is None:
            begin = partial(self._backend.begin, self._path)
            self._upload = self._retrying.call(begin, action="write", url=self._url)
        if len(self._sending) >= self._backend.parallel:
            self._sending[-self._backend.parallel].result()
        put = partial(self._backend.put_part, self._path, self._upload, len(self._sending) + 1, part)
        self._sending.append(self._pool.submit(self._retrying_parts.call, put, action="write", url=self._url))


def split_path(path: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = path.partition("/")
    return bucket, key


def max_bytes(start: int, end: int | None) -> int:
    """Upper bound of the size of an answer with bytes [start, end)."""
    return 1 << 30 if end is None else end - start


def request_timeout_s(num_bytes: int, *, answer_timeout_s: float) -> float:
    """Bound on one request with all its bytes. The clients' own time-outs do not notice a peer that stops reading."""
    return CONNECT_TIMEOUT_S + answer_timeout_s + num_bytes / _SLOWEST_BYTES_PER_S
