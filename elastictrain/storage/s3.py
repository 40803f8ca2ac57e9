"""Requests to S3 and to services that speak its protocol, through s3fs.

s3fs (botocore) takes credentials and endpoint from the environment and the AWS profile: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_CA_BUNDLE.
"""

import io
from collections.abc import Iterable, Mapping
from typing import Protocol, cast

from elastictrain.storage.store import ObjectInfo

CONNECT_TIMEOUT_S = 5
_SLOWEST_BYTES_PER_S = 1 << 20
_CONNECTIONS = 32
_MARK = "elastictrain-creator"


def request_timeout_s(num_bytes: int, *, answer_timeout_s: float) -> float:
    """Bound on one request with all its bytes. The client's own time-outs do not see a peer that stops reading."""
    return CONNECT_TIMEOUT_S + answer_timeout_s + num_bytes / _SLOWEST_BYTES_PER_S


class _Body(Protocol):
    async def read(self) -> bytes: ...
    def close(self) -> None: ...


class _S3FileSystem(Protocol):
    """The part of s3fs.S3FileSystem that is used here."""

    loop: object
    retries: int

    def call_s3(self, method: str, **kwargs: object) -> Mapping[str, object]: ...
    async def _call_s3(self, method: str, **kwargs: object) -> Mapping[str, object]: ...


class S3Backend:
    """See `Backend`."""

    def __init__(self, *, answer_timeout_s: float) -> None:
        import fsspec

        self._answer_timeout_s = answer_timeout_s

        self._files: _S3FileSystem = fsspec.filesystem(
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
        # Ours are the only retries: those of s3fs and of botocore would multiply with them.
        self._files.retries = 1

    @property
    def parallel(self) -> int:
        return 4

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        from fsspec.asyn import sync

        where = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if (start, end) != (0, None) else {}
        expected = end - start if end is not None else 1 << 30

        async def fetch() -> bytes:
            answer = await self._files._call_s3("get_object", **_address(path), **where)
            body = cast(_Body, answer["Body"])
            try:
                return await body.read()
            finally:
                body.close()

        return cast(bytes, sync(self._files.loop, fetch, timeout=self._bound(expected)))

    def put(self, path: str, data: bytes) -> None:
        self._send("put_object", data, **_address(path))

    def create(self, path: str, data: bytes, *, mark: str) -> None:
        self._send("put_object", data, **_address(path), IfNoneMatch="*", Metadata={_MARK: mark})

    def is_ours(self, path: str, data: bytes, *, mark: str) -> bool:
        found = self.call("head_object", **_address(path))["Metadata"]
        return cast(Mapping[str, str], found).get(_MARK) == mark

    def begin(self, path: str) -> "S3Upload":
        return S3Upload(self, path)

    def info(self, path: str) -> ObjectInfo:
        return _info(path, self.call("head_object", **_address(path)), size_field="ContentLength")

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        bucket, _, prefix = folder.partition("/")
        request: dict[str, object] = {"Bucket": bucket, "Prefix": prefix}
        while True:
            page = self.call("list_objects_v2", **request)
            for item in cast(list[Mapping[str, object]], page.get("Contents", [])):
                if not str(item["Key"]).endswith("/"):
                    yield _info(f"{bucket}/{item['Key']}", item, size_field="Size")
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def remove(self, path: str) -> None:
        self.call("delete_object", **_address(path))

    def call(self, method: str, **request: object) -> Mapping[str, object]:
        """One small request."""
        return self._files.call_s3(method, timeout=self._bound(0), **request)

    def _bound(self, num_bytes: int) -> float:
        return request_timeout_s(num_bytes, answer_timeout_s=self._answer_timeout_s)

    def _send(self, method: str, data: bytes, **request: object) -> Mapping[str, object]:
        # A file object, because the client warns about large plain bytes; it shares the memory of `data`.
        return self._files.call_s3(method, timeout=self._bound(len(data)), Body=io.BytesIO(data), **request)


class S3Upload:
    """A multipart upload. See `Upload`."""

    def __init__(self, backend: S3Backend, path: str) -> None:
        self._backend = backend
        self._path = path
        self._upload = {
            **_address(path),
            "UploadId": str(backend.call("create_multipart_upload", **_address(path))["UploadId"]),
        }
        self._tags: dict[int, object] = {}
        self._finishing = 0

    def put_part(self, number: int, data: bytes) -> None:
        self._tags[number] = self._backend._send("upload_part", data, PartNumber=number, **self._upload)["ETag"]

    def finish(self, total_bytes: int) -> None:
        self._finishing += 1
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        try:
            self._backend.call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload)
        except FileNotFoundError:
            # The upload is unknown once it is complete: an earlier attempt may have been carried out, its answer lost.
            if self._finishing == 1 or self._backend.info(self._path).size_bytes != total_bytes:
                raise

    def abort(self) -> None:
        self._backend.call("abort_multipart_upload", **self._upload)


def _address(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _info(path: str, answer: Mapping[str, object], *, size_field: str) -> ObjectInfo:
    modified = answer["LastModified"]
    return ObjectInfo(path, int(str(answer[size_field])), modified.timestamp())  # type: ignore[attr-defined]
