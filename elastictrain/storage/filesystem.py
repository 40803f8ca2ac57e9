"""Implements `Backend` for any other service that fsspec knows (memory://, sftp://, ...).

Only object stores write atomically; file servers (sftp, smb, hdfs) show a file while it grows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from threading import Lock
from typing import Any

from elastictrain.storage.remote import max_bytes, request_timeout_s
from elastictrain.storage.store import ObjectInfo

_BLOCK_BYTES = 16 << 20


class StreamedUploads:
    """Uploads through fsspec's file for writing; in gcsfs a resumable upload that `close` completes."""

    parallel = 1
    _files: Any

    def begin(self, path: str) -> Any:
        return self._files.open(path, "wb", block_size=_BLOCK_BYTES)

    def put_part(self, path: str, upload: Any, number: int, data: bytes) -> Any:
        upload.write(data)

    def finish(self, path: str, upload: Any, parts: Sequence[Any]) -> None:
        upload.close()

    def abort(self, path: str, upload: Any) -> None:
        upload.discard()
        # Without this the garbage collector would close the file, which completes the upload.
        upload.closed = True


class FilesystemBackend(StreamedUploads):
    def __init__(self, url: str, answer_timeout_s: float) -> None:
        import fsspec

        self._bound_s = partial(request_timeout_s, answer_timeout_s=answer_timeout_s)
        self._memory = url.startswith("memory:")
        # Objects in memory:// belong to fsspec's one cached instance; other instances are private and cache no listings.
        options = {} if self._memory else {"skip_instance_cache": True, "use_listings_cache": False}
        self._files: Any = fsspec.core.url_to_fs(url, **options)[0]
        # memory:// is a plain dict: check and creation are atomic only under a lock, which is stored with the dict.
        self._lock: Lock | None = self._files.__dict__.setdefault("_elastictrain_lock", Lock()) if self._memory else None

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        where = {"start": start, "end": end} if (start, end) != (0, None) else {}
        with self._request(max_bytes(start, end)) as bound:
            return bytes(self._files.cat_file(path, **where, **bound))

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        condition = {} if mark is None else {"mode": "create"}
        with self._request(len(data)) as bound:
            self._files.pipe_file(path, data, **condition, **bound)

    def begin(self, path: str) -> Any:
        return () if self._memory else super().begin(path)

    def put_part(self, path: str, upload: Any, number: int, data: bytes) -> Any:
        return data if self._memory else super().put_part(path, upload, number, data)

    def finish(self, path: str, upload: Any, parts: Sequence[Any]) -> None:
        if self._memory:
            self.put(path, b"".join(parts))
        else:
            super().finish(path, upload, parts)

    def abort(self, path: str, upload: Any) -> None:
        if not self._memory:
            super().abort(path, upload)

    def describe(self, path: str) -> tuple[ObjectInfo, str | None]:
        with self._request(0) as bound:
            found = self._files.info(path, **bound)
        if found.get("type") == "directory":
            raise FileNotFoundError(path)
        # No mark exists that all services keep. memory:// loses no answers; for others `RemoteStore` compares contents.
        return _info(path, found), "" if self._memory else None

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """Drops the client's cache of listings first; empty if there is no such folder."""
        with self._request(0) as bound:
            self._files.invalidate_cache()
            try:
                found = self._files.find(folder.rstrip("/"), detail=True, **bound)
            except FileNotFoundError:
                return []
        return [
            _info(path, item) for path, item in found.items() if path.startswith(folder) and item.get("type") != "directory"
        ]

    def remove(self, path: str) -> None:
        with self._request(0) as bound:
            self._files.rm_file(path, **bound)

    @contextmanager
    def _request(self, num_bytes: int) -> Iterator[dict[str, object]]:
        """Arguments that bound the time of one request, where the client supports it."""
        if self._lock is not None:
            with self._lock:
                yield {}
        else:
            yield {"timeout": self._bound_s(num_bytes)} if self._files.async_impl else {}


def _info(path: str, found: Mapping[str, Any]) -> ObjectInfo:
    # Each client has its own name and type for the time of the last write.
    names = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
    times = (found.get(name) for name in names)
    time: Any = next((one for one in times if isinstance(one, datetime | int | float | str)), 0.0)
    time = datetime.fromisoformat(time) if isinstance(time, str) else time
    return ObjectInfo(path, int(found["size"]), time.timestamp() if isinstance(time, datetime) else float(time))
