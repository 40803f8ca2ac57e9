"""Implements `Backend` for S3 and services with its protocol, through s3fs.

s3fs (botocore) takes credentials and endpoint from the environment and the AWS profile: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_CA_BUNDLE.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from elastictrain.storage.remote import CONNECT_TIMEOUT_S, max_bytes, request_timeout_s, split_path
from elastictrain.storage.store import ObjectInfo

_CONNECTIONS = 32
_MARK = "elastictrain-creator"


class S3Backend:
    parallel = 4

    def __init__(self, url: str, answer_timeout_s: float) -> None:
        import fsspec

        self._bound_s = partial(request_timeout_s, answer_timeout_s=answer_timeout_s)
        self._files: Any = fsspec.filesystem(
            "s3",
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": answer_timeout_s,
                "max_pool_connections": _CONNECTIONS,
                "retries": {"total_max_attempts": 1},
            },
        )
        # `Retrying` is the only retry loop: those of s3fs and botocore would multiply with it.
        self._files.retries = 1

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        """Takes at most the time of `request_timeout_s`; without `end` that for 1 GiB."""
        from fsspec.asyn import sync

        # Not `cat_file`, which repeats a failed request once.
        async def fetch() -> object:
            where = {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
            answer = await self._files._call_s3("get_object", **_address(path), **where)
            try:
                return await answer["Body"].read()
            finally:
                answer["Body"].close()

        return cast(bytes, sync(self._files.loop, fetch, timeout=self._bound_s(max_bytes(start, end))))

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        condition = {} if mark is None else {"IfNoneMatch": "*", "Metadata": {_MARK: mark}}
        self.call("put_object", data, **_address(path), **condition)

    def begin(self, path: str) -> dict[str, Any]:
        return {**_address(path), "UploadId": self.call("create_multipart_upload", **_address(path))["UploadId"]}

    def put_part(self, path: str, upload: dict[str, Any], number: int, data: bytes) -> dict[str, Any]:
        return {"PartNumber": number, "ETag": self.call("upload_part", data, PartNumber=number, **upload)["ETag"]}

    def finish(self, path: str, upload: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
        self.call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload)

    def abort(self, path: str, upload: dict[str, Any]) -> None:
        self.call("abort_multipart_upload", **upload)

    def describe(self, path: str) -> tuple[ObjectInfo, str | None]:
        found = self.call("head_object", **_address(path))
        info = ObjectInfo(path, int(found["ContentLength"]), found["LastModified"].timestamp())
        return info, found["Metadata"].get(_MARK, "")

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """Leaves out placeholders of folders, whose names end with '/'. One request per page."""
        bucket, prefix = split_path(folder)
        request: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        while True:
            page = self.call("list_objects_v2", **request)
            for item in page.get("Contents", []):
                if not item["Key"].endswith("/"):
                    yield ObjectInfo(f"{bucket}/{item['Key']}", int(item["Size"]), item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def remove(self, path: str) -> None:
        self.call("delete_object", **_address(path))

    def call(self, method: str, data: bytes | None = None, **request: object) -> Mapping[str, Any]:
        if data is not None:
            # A file object, because the client warns about large plain bytes; it shares the memory of `data`.
            request["Body"] = io.BytesIO(data)
        answer = self._files.call_s3(method, timeout=self._bound_s(len(data or b"")), **request)
        return cast(Mapping[str, Any], answer)


def _address(path: str) -> dict[str, Any]:
    return dict(zip(("Bucket", "Key"), split_path(path), strict=True))
