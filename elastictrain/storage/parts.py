"""Sending a large object in parts, a few at a time, with bounded memory."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from elastictrain.storage.backend import Backend, Upload
from elastictrain.storage.store import Bytes

PART_BYTES = 16 << 20
"""S3 takes 10,000 parts at most: objects end at 160 GiB. Some services want all parts but the last to be of one size."""

logger = logging.getLogger(__name__)

Attempt = Callable[[Callable[[], None]], None]
"""Runs a request until it succeeds, or raises a StorageError."""


class PartWriter:
    """Gathers bytes to parts and sends them in the background; `finish` or `abort` ends it.

    It holds `parallel` + 1 parts at most. An object smaller than one part is sent in one request.
    """

    def __init__(self, backend: Backend, path: str, *, attempt: Attempt, attempt_once: Attempt) -> None:
        self._backend = backend
        self._path = path
        self._attempt = attempt
        # Where parts are a stream, a failed one may have been taken in half, and cannot be sent again. A stream that failed to
        # close counts as closed, so that closing it again would pass for success.
        self._attempt_in_stream = attempt if backend.parallel > 1 else attempt_once
        self._gathered = bytearray()
        self._upload: Upload | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._sending: deque[Future[None]] = deque()
        self._number = 0
        self._total_bytes = 0

    def write(self, data: Bytes) -> None:
        """Append; blocks while all connections are busy. Raises what sending an earlier part raised."""
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
        """Make the object visible."""
        if self._upload is None:
            data = bytes(self._gathered)
            self._attempt(lambda: self._backend.put(self._path, data))
            return
        upload = self._upload
        if self._gathered:
            self._send(bytes(self._gathered))
        while self._sending:
            self._sending.popleft().result()
        self._attempt_in_stream(lambda: upload.finish(self._total_bytes))
        self._end_pool()

    def abort(self) -> None:
        """Leave nothing behind; never raises, because it runs when something else already has gone wrong."""
        self._end_pool()
        if self._upload is not None:
            try:
                self._upload.abort()
            except Exception as error:  # noqa: BLE001  see above; a rule of the bucket can remove what is left
                logger.warning("parts of an unfinished upload to %s may be left: %s", self._path, error)

    def _send(self, part: bytes) -> None:
        if self._upload is None:

            def begin() -> None:
                self._upload = self._backend.begin(self._path)

            self._attempt(begin)
            self._pool = ThreadPoolExecutor(self._backend.parallel, thread_name_prefix="upload")
        self._number += 1
        number, upload, pool = self._number, self._upload, self._pool
        assert upload is not None  # noqa: S101
        assert pool is not None  # noqa: S101
        while len(self._sending) >= self._backend.parallel:
            self._sending.popleft().result()
        self._sending.append(pool.submit(self._attempt_in_stream, lambda: upload.put_part(number, part)))

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
