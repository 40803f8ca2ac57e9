"""Implements `Backend` for Google Cloud Storage: its JSON API, with the credentials and connections of gcsfs.

gcsfs (google-auth) takes credentials from GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the
metadata service; without any it is anonymous. STORAGE_EMULATOR_HOST replaces the address.
"""

import io
import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import cast
from urllib.parse import quote

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.storage.filesystem import StreamedUploads
from elastictrain.storage.remote import max_bytes, request_timeout_s, split_path
from elastictrain.storage.store import ObjectInfo

_MARK = "elastictrain-creator"
_FIELDS = "items(name,size,updated),nextPageToken"


class GcsAnswerError(Exception):
    """The service refused a request. `storage.failures` reads `status` and `error_code`."""

    def __init__(self, status: int, error_code: str, message: str) -> None:
        super().__init__(f"{message or error_code} (HTTP {status})")
        self.status = status
        self.error_code = error_code


class GcsBackend(StreamedUploads):
    def __init__(self, url: str, answer_timeout_s: float) -> None:
        # Not the class that fsspec chooses: it asks for the bucket's type by gRPC before each request. An emulator does not
        # answer that, and a user's permissions may not allow it.
        from gcsfs.core import GCSFileSystem

        self._bound_s = partial(request_timeout_s, answer_timeout_s=answer_timeout_s)
        self._files = GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        headers = {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        where, num_bytes = f"download/storage/v1/{_object(path)}", max_bytes(start, end)
        return self._ask("GET", where, {"alt": "media"}, headers=headers, num_bytes=num_bytes)

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        """Sends bytes and metadata in one request, so that no created object lacks its mark."""
        bucket, key = split_path(path)
        boundary = secrets.token_hex(16)
        about = json.dumps({"name": key} if mark is None else {"name": key, "metadata": {_MARK: mark}})
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{about}\r\n"
        middle = f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        body = b"".join((head.encode(), middle.encode(), data, f"\r\n--{boundary}--".encode()))
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        # Generation 0 means that the object does not exist.
        asked = {"uploadType": "multipart"} | ({} if mark is None else {"ifGenerationMatch": "0"})
        where = f"upload/storage/v1/b/{quote(bucket, safe='')}/o"
        self._ask("POST", where, asked, headers=headers, data=body, in_bucket=True)

    def describe(self, path: str) -> tuple[ObjectInfo, str | None]:
        item = parse_json(self._ask("GET", f"storage/v1/{_object(path)}", {}))
        return _info(path, item), str(item.get("metadata", {}).get(_MARK, ""))

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """Leaves out placeholders of folders, whose names end with '/'. One request per page."""
        bucket, prefix = split_path(folder)
        where, asked = f"storage/v1/b/{quote(bucket, safe='')}/o", {"prefix": prefix, "fields": _FIELDS}
        while True:
            page = parse_json(self._ask("GET", where, asked, in_bucket=True), limits=DOCUMENT)
            for item in page.get("items", []):
                if not item["name"].endswith("/"):
                    yield _info(f"{bucket}/{item['name']}", item)
            if not page.get("nextPageToken"):
                return
            asked["pageToken"] = page["nextPageToken"]

    def remove(self, path: str) -> None:
        self._ask("DELETE", f"storage/v1/{_object(path)}", {})

    def _ask(
        self,
        method: str,
        where: str,
        asked: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes = b"",
        num_bytes: int = 0,
        in_bucket: bool = False,
    ) -> bytes:
        """One request, tried once. `in_bucket`: the request needs no existing object, so a 404 means the bucket."""
        from fsspec.asyn import sync
        from yarl import URL

        files = self._files
        url = f"{files._location}/{where}"

        async def request() -> bytes:
            """Raises: GcsAnswerError for a status from 400 up; what aiohttp raises."""
            session = await files._set_session()
            signed = files._get_headers(dict(headers or {}))
            # The path is quoted already; keys may contain any character.
            address = URL(url, encoded=True).update_query(asked)
            # A file object, because the client warns about large plain bytes; it shares the memory of `data`.
            body = io.BytesIO(data) if data else None
            async with session.request(method, address, headers=signed, data=body, timeout=None) as answer:
                content = await answer.read()
                if answer.status >= 400:
                    raise _refusal(answer.status, content, in_bucket=in_bucket)
            return cast(bytes, content)

        return cast(bytes, sync(files.loop, request, timeout=self._bound_s(max(num_bytes, len(data)))))


def _refusal(status: int, content: bytes, *, in_bucket: bool) -> GcsAnswerError:
    """The service answers with a JSON object; a proxy may answer with text."""
    text = content.decode(errors="replace").strip()
    try:
        said = parse_json(text)["error"]
        message = str(said["message"])
        code = str(said["errors"][0]["reason"]) if said.get("errors") else ""
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        message, code = text.partition("\n")[0][:200], ""
    if status == 404 and (in_bucket or "bucket does not exist" in message):
        code = "NoSuchBucket"
    return GcsAnswerError(status, code, message)


def _object(path: str) -> str:
    return "b/{}/o/{}".format(*(quote(part, safe="") for part in split_path(path)))


def _info(path: str, item: Mapping[str, object]) -> ObjectInfo:
    return ObjectInfo(path, int(str(item.get("size", 0))), datetime.fromisoformat(str(item["updated"])).timestamp())
