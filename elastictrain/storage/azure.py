"""Implements `Backend` for Azure Blob Storage through the client of adlfs.

adlfs takes account and credentials from the environment: AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with
AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_CLIENT_ID (and _SECRET, _TENANT_ID), or what azure-identity
finds: a managed identity, `az login`.
"""

import base64
import io
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from elastictrain.storage.remote import CONNECT_TIMEOUT_S, max_bytes, request_timeout_s, split_path
from elastictrain.storage.store import ObjectInfo

_MARK = "elastictrain_creator"  # the service takes no hyphens in names of metadata
_FOLDER_MARK = "hdi_isfolder"

T = TypeVar("T")


class AzureBackend:
    parallel = 4

    def __init__(self, url: str, answer_timeout_s: float) -> None:
        import fsspec

        self._bound_s = partial(request_timeout_s, answer_timeout_s=answer_timeout_s)
        try:
            self._files: Any = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)[0]
        except ValueError as error:
            raise PermissionError(
                "no storage account and credentials in the environment; set AZURE_STORAGE_CONNECTION_STRING, or "
                f"AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY ({error})"
            ) from error
        # `Retrying` is the only retry loop.
        self._once = {"retry_total": 0, "connection_timeout": CONNECT_TIMEOUT_S, "read_timeout": answer_timeout_s}

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        async def fetch() -> bytes:
            where = {} if (start, end) == (0, None) else {"offset": start, "length": None if end is None else end - start}
            stream = await self._blob(path).download_blob(**where, **self._once)
            return cast(bytes, await stream.readall())

        return self._wait(fetch, max_bytes(start, end))

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        # overwrite=False sends `If-None-Match: *`.
        metadata = None if mark is None else {_MARK: mark}
        self.call(path, "upload_blob", data=data, overwrite=mark is None, metadata=metadata)

    def begin(self, path: str) -> str:
        # The blocks of concurrent uploads to one object need different names, all of one length.
        return secrets.token_hex(8)

    def put_part(self, path: str, upload: str, number: int, data: bytes) -> str:
        block = base64.urlsafe_b64encode(f"{upload}-{number:08d}".encode()).decode()
        self.call(path, "stage_block", data=data, block_id=block)
        return block

    def finish(self, path: str, upload: str, parts: Sequence[str]) -> None:
        from azure.storage.blob import BlobBlock

        # Repeating the request is safe: it names the same blocks.
        self.call(path, "commit_block_list", [BlobBlock(block) for block in parts])

    def abort(self, path: str, upload: str) -> None:
        """Azure itself deletes uncommitted blocks after a week."""

    def describe(self, path: str) -> tuple[ObjectInfo, str | None]:
        found = self.call(path, "get_blob_properties")
        if _is_folder(found.metadata):
            raise FileNotFoundError(path)
        info = ObjectInfo(path, int(found.size), found.last_modified.timestamp())
        return info, (found.metadata or {}).get(_MARK, "")

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """Leaves out blobs that stand for folders."""
        container, prefix = split_path(folder)

        async def gather() -> list[ObjectInfo]:
            client = self._files.service_client.get_container_client(container)
            blobs = client.list_blobs(name_starts_with=prefix, include=["metadata"], **self._once)
            return [
                ObjectInfo(f"{container}/{blob.name}", int(blob.size), blob.last_modified.timestamp())
                async for blob in blobs
                if not blob.name.endswith("/") and not _is_folder(blob.metadata)
            ]

        return self._wait(gather, 0)

    def remove(self, path: str) -> None:
        self.call(path, "delete_blob")

    def call(self, path: str, method: str, *arguments: object, data: bytes | None = None, **options: object) -> Any:
        # A file object, because the client warns about large plain bytes; it shares the memory of `data`.
        body = {} if data is None else {"data": io.BytesIO(data), "length": len(data)}

        async def request() -> object:
            return await getattr(self._blob(path), method)(*arguments, **body, **options, **self._once)

        return self._wait(request, len(data or b""))

    def _blob(self, path: str) -> Any:
        container, key = split_path(path)
        return self._files.service_client.get_blob_client(container=container, blob=key)

    def _wait(self, request: Callable[[], Awaitable[T]], num_bytes: int) -> T:
        from fsspec.asyn import sync

        return cast(T, sync(self._files.loop, request, timeout=self._bound_s(num_bytes)))


def _is_folder(metadata: dict[str, str] | None) -> bool:
    """Whether the blob stands for a folder, in an account with a hierarchical namespace."""
    return any(name.lower() == _FOLDER_MARK and value == "true" for name, value in (metadata or {}).items())
