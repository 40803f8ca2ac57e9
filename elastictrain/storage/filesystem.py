"""Implements `Backend` for any other service that fsspec knows (memory://, sftp://, ...).

Only object stores write atomically; file servers (sftp, smb, hdfs) show a file while it grows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from threading import Lock
from typing import Any

from elastictrain.storage.remote import most_bytes, request_timeout_s
from elastictrain.storage.store import ObjectInfo

_BLOCK_BYTES = 16 << 20


class FilesystemBackend:
    parallel = 1

    def __init__(self, url: str, answer_timeout_s: float) -> None:
        import fsspec

        self._answer_timeout_s = answer_timeout_s
        self._memory = url.startswith("memory:")
        # Objects in memory:// belong to fsspec's one cached instance; other instances are private and cache no listings.
        options = {} if self._memory else {"skip_instance_cache": True, "use_listings_cache": False}
        self._files: Any = fsspec.core.url_to_fs(url, **options)[0]
        # memory:// is a plain dict: check and creation are atomic only under a lock, which is stored with the dict.
        self._lock: Lock | None = self._files.__dict__.setdefault("_elastictrain_lock", Lock()) if self._memory else None

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        where = {"start": start, "end": end} if (start, end) != (0, None) else {}
        with self._request(most_bytes(start, end)) as bound:
            return bytes(self._files.cat_file(path, **where, **bound))

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        condition = {} if mark is None else {"mode": "create"}
        with self._request(len(data)) as bound:
            self._files.pipe_file(path, data, **condition, **bound)

    def begin(self, path: str) -> Any:
        return () if self._memory else begin_stream(self._files, path)

    def put_part(self, path: str, upload: Any, number: int, data: bytes) -> bytes:
        if not self._memory:
            upload.write(data)
            return b""
        return data

    def finish(self, path: str, upload: Any, parts: Sequence[bytes]) -> None:
        if self._memory:
            self.put(path, b"".join(parts))
        else:
            upload.close()

    def abort(self, path: str, upload: Any) -> None:
        if not self._memory:
            abort_stream(upload)

    def describe(self, path: str) -> tuple[ObjectInfo, str | None]:
        with self._request(0) as bound:
            found = self._files.info(path, **bound)
        if found.get("type") == "directory":
            raise FileNotFoundError(path)
        # No mark exists that all services keep. memory:// loses no answers; for others `RemoteStore` compares contents.
        return _info(path, found), "" if self._memory else None

    def find(self, folder: str) -> Iterable[ObjectInfo]:
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
            timeout_s = request_timeout_s(num_bytes, answer_timeout_s=self._answer_timeout_s)
            yield {"timeout": timeout_s} if self._files.async_impl else {}


def begin_stream(files: Any, path: str) -> Any:
    """fsspec's file for writing; in gcsfs a resumable upload that `close` completes."""
    return files.open(path, "wb", block_size=_BLOCK_BYTES)


def abort_stream(file: Any) -> None:
    file.discard()
    # Without this the garbage collector would close the file, which completes the upload.
    file.closed = True


def _info(path: str, found: Mapping[str, object]) -> ObjectInfo:
    return ObjectInfo(path, int(str(found["size"])), _unix_seconds(found))


def _unix_seconds(found: Mapping[str, object]) -> float:
    """Time of the last write; each client has its own name and type for it. 0 if absent."""
    for field in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        value = found.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    return 0.0
