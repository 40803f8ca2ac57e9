import errno
import os
from enum import Enum

import pytest

from elastictrain.errors import AccessDeniedError, ObjectNotFoundError, PermanentStorageError, StorageFullError
from elastictrain.storage.failures import Fault, errno_of, fault_of, reason_of, storage_error


class ClientError(Exception):
    """Shaped like botocore's."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """Shaped like gcsfs's."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class ContentLengthError(Exception):
    """Shaped like aiohttp's: a torn answer that claims to be a bad request."""

    status = 400


class ClientPayloadError(Exception):
    pass


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class AzureCode(str, Enum):  # noqa: UP042  # as azure-storage-blob has them: found by their value, not by their text
    CONTAINER_NOT_FOUND = "ContainerNotFound"
    CONTAINER_BEING_DELETED = "ContainerBeingDeleted"
    BLOB_NOT_FOUND = "BlobNotFound"
    SERVER_BUSY = "ServerBusy"


class AzureError(Exception):
    """An error of a client that keeps code and status side by side."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(str(code))
        self.error_code = code
        self.status_code = status


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ClientError("SlowDown", 503), Fault.TRANSIENT),
        (ClientError("Unheard", 503), Fault.TRANSIENT),
        (ClientError("Unheard", 599), Fault.TRANSIENT),
        (ClientError("NotImplemented", 501), Fault.PERMANENT),
        (ClientError("429", 429), Fault.TRANSIENT),
        (ClientError("500", 500), Fault.TRANSIENT),
        (ClientError("InvalidArgument", 400), Fault.PERMANENT),
        (ClientError("NoSuchBucket", 404), Fault.NO_BUCKET),
        (ClientError("NoSuchKey", 404), Fault.NOT_FOUND),
        (ClientError("404", 404), Fault.NOT_FOUND),
        (ClientError("403", 403), Fault.DENIED),
        (ClientError("ExpiredToken", 400), Fault.DENIED),
        (ClientError("InvalidRange", 416), Fault.RANGE),
        (ClientError("ConditionalRequestConflict", 409), Fault.TRANSIENT),
        # What s3fs makes of the answers: the errno is its invention.
        (caused(OSError(22, "pre-conditions"), ClientError("PreconditionFailed", 412)), Fault.EXISTS),
        (caused(FileExistsError(), ClientError("PreconditionFailed", 412)), Fault.EXISTS),
        (caused(OSError(errno.EBUSY, "slow"), ClientError("SlowDown", 503)), Fault.TRANSIENT),
        (caused(FileNotFoundError(), ClientError("NoSuchBucket", 404)), Fault.NO_BUCKET),
        (caused(ClientPayloadError(), ContentLengthError()), Fault.TRANSIENT),
        (AzureError(AzureCode.CONTAINER_NOT_FOUND, 404), Fault.NO_BUCKET),
        (AzureError(AzureCode.BLOB_NOT_FOUND, 404), Fault.NOT_FOUND),
        (AzureError(AzureCode.CONTAINER_BEING_DELETED, 409), Fault.TRANSIENT),
        (AzureError(AzureCode.SERVER_BUSY, 503), Fault.TRANSIENT),
        (AzureError("rateLimitExceeded", 403), Fault.TRANSIENT),
        (AzureError("forbidden", 403), Fault.DENIED),
        (HttpError(503), Fault.TRANSIENT),
        (HttpError(412), Fault.EXISTS),
        (HttpError(400), Fault.PERMANENT),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Fault.TRANSIENT),
        (TimeoutError(), Fault.TRANSIENT),
        (type("IncompleteRead", (Exception,), {})(), Fault.TRANSIENT),
        (type("NoCredentialsError", (Exception,), {})(), Fault.DENIED),
        (caused(ConnectionError(), type("SSLCertVerificationError", (OSError,), {})()), Fault.PERMANENT),
        (OSError(errno.ENOSPC, ""), Fault.FULL),
        (OSError(errno.EDQUOT, ""), Fault.FULL),
        (OSError(errno.EROFS, ""), Fault.DENIED),
        (PermissionError(errno.EPERM, ""), Fault.DENIED),
        (OSError(errno.ESTALE, ""), Fault.TRANSIENT),
        (OSError(errno.EIO, ""), Fault.TRANSIENT),
        (NotADirectoryError(errno.ENOTDIR, ""), Fault.PERMANENT),
        (RuntimeError("?"), Fault.PERMANENT),
    ],
    ids=repr,
)
def test_fault(error: Exception, fault: Fault) -> None:
    assert fault_of(error) is fault


def test_the_number_is_that_of_the_outermost_error_that_has_one() -> None:
    assert errno_of(caused(OSError(22, "x"), OSError(5, "y"))) == 22
    assert errno_of(caused(RuntimeError("x"), OSError("y"))) is None
    assert errno_of(caused(RuntimeError("x"), caused(OSError("y"), OSError(5, "z")))) == 5


@pytest.mark.parametrize(
    ("fault", "kind", "remedy"),
    [
        (Fault.FULL, StorageFullError, "free space"),
        (Fault.DENIED, AccessDeniedError, "credentials"),
        (Fault.NOT_FOUND, ObjectNotFoundError, "does not exist"),
        (Fault.NO_BUCKET, PermanentStorageError, "create the bucket"),
    ],
)
def test_error_says_what_to_do(fault: Fault, kind: type[Exception], remedy: str) -> None:
    error = storage_error(fault, action="write", url="s3://b/k", reason="why")
    assert type(error) is kind
    assert str(error).startswith("cannot write s3://b/k: why; ")
    assert remedy in str(error)


def test_reason_is_one_line() -> None:
    assert reason_of(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x")) == os.strerror(errno.ENOSPC)
    assert reason_of(RuntimeError("first\nsecond")) == "first"
    assert reason_of(TimeoutError()) == "TimeoutError"
