"""Which kind of failure an exception of a backend is. Pure; knows backends' classes by name only."""

import errno
from dataclasses import dataclass
from enum import Enum, auto

from elastictrain.errors import (
    AccessDeniedError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentStorageError,
    StorageError,
    StorageFullError,
    TransientStorageError,
)


class Fault(Enum):
    """What a failed request means."""

    TRANSIENT = auto()
    NOT_FOUND = auto()
    NO_BUCKET = auto()
    EXISTS = auto()
    DENIED = auto()
    FULL = auto()
    RANGE = auto()
    """The range begins behind the end of an object that exists."""
    PERMANENT = auto()


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """What an exception and its causes say, outermost first."""

    names: tuple[str, ...] = ()
    """Names of the classes and of their bases."""
    code: str | None = None
    """Error code of the service (`NoSuchKey`)."""
    status: int | None = None
    """HTTP status."""
    errno: int | None = None


_CODES = {
    Fault.NO_BUCKET: "NoSuchBucket ContainerNotFound",
    Fault.NOT_FOUND: "NoSuchKey NoSuchUpload BlobNotFound",
    Fault.EXISTS: "PreconditionFailed BlobAlreadyExists",
    Fault.RANGE: "InvalidRange",
    Fault.FULL: "QuotaExceeded XMinioStorageFull",
    Fault.DENIED: (
        "AccessDenied AllAccessDisabled ExpiredToken InvalidAccessKeyId InvalidSecurity InvalidToken NotSignedUp "
        "RequestTimeTooSkewed SignatureDoesNotMatch"
    ),
    Fault.TRANSIENT: (
        "BadDigest ContainerBeingDeleted ConditionalRequestConflict IncompleteBody InternalError OperationAborted "
        "RequestLimitExceeded RequestTimeout ServerBusy ServiceUnavailable SlowDown Throttling ThrottlingException "
        "TooManyRequests XAmzContentSHA256Mismatch backendError rateLimitExceeded userRateLimitExceeded"
    ),
}
_FAULT_OF_CODE = {code: fault for fault, codes in _CODES.items() for code in codes.split()}

_STATUSES = {
    Fault.DENIED: (401, 403),
    Fault.NOT_FOUND: (404,),
    Fault.TRANSIENT: (408, 409, 425, 429),
    Fault.EXISTS: (412,),
    Fault.RANGE: (416,),
    Fault.PERMANENT: (501, 505),
    Fault.FULL: (507,),
}
_FAULT_OF_STATUS = {status: fault for fault, statuses in _STATUSES.items() for status in statuses}

# In order: a failed certificate check is also a connection error, and stays one for ever.
_CLASSES = {
    Fault.PERMANENT: "SSLCertVerificationError ClientConnectorCertificateError SSLError",
    Fault.DENIED: (
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError SSOError ProfileNotFound "
        "RefreshError DefaultCredentialsError ClientAuthenticationError PermissionError"
    ),
    Fault.EXISTS: "FileExistsError ResourceExistsError",
    Fault.NOT_FOUND: "FileNotFoundError ResourceNotFoundError",
    Fault.TRANSIENT: (
        "TimeoutError ConnectionError ClientConnectionError ClientPayloadError HTTPClientError IncompleteRead "
        "IncompleteReadError ResponseParserError ResponseStreamingError ServiceRequestError ServiceResponseError"
    ),
}

_ERRNOS = {
    Fault.FULL: "ENOSPC EDQUOT",
    Fault.DENIED: "EACCES EPERM EROFS",
    Fault.TRANSIENT: "ESTALE EIO ETIMEDOUT EAGAIN EPIPE ECONNRESET ECONNREFUSED EHOSTUNREACH ENETUNREACH EREMOTEIO",
}
_FAULT_OF_ERRNO = {getattr(errno, name): fault for fault, names in _ERRNOS.items() for name in names.split()}


def facts_of(error: BaseException) -> FailureFacts:
    """Reads what classification needs from an exception and its chain of causes."""
    names: list[str] = []
    code: str | None = None
    status: int | None = None
    number: int | None = None
    seen: BaseException | None = error
    while seen is not None and len(names) < 100:
        names.extend(base.__name__ for base in type(seen).__mro__ if base not in (Exception, BaseException, object))
        found_code, found_status = _answer_of(seen)
        code = code or found_code
        status = status or found_status
        if number is None and isinstance(seen, OSError):
            number = seen.errno
        seen = seen.__cause__
    return FailureFacts(tuple(names), code, status, number)


def _answer_of(error: BaseException) -> tuple[str | None, int | None]:
    """Error code and HTTP status, where each kind of client keeps them."""
    response: object = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return code, status if isinstance(status, int) else None
    named = getattr(error, "error_code", None)
    # The codes of Azure are an enum, which is text but is not found as such.
    named = getattr(named, "value", named)
    for attribute in ("status_code", "status", "code"):
        value = str(getattr(error, attribute, ""))
        if value.isdecimal() and 400 <= int(value) < 600:
            return named if isinstance(named, str) else None, int(value)
    return None, None


def classify(facts: FailureFacts) -> Fault:
    """What the failure means.

    The service's own code says most. A status counts less than the class: aiohttp gives a torn answer the status 400. An errno
    is often the invention of a client.
    """
    if facts.code in _FAULT_OF_CODE:
        return _FAULT_OF_CODE[facts.code]
    for fault, names in _CLASSES.items():
        if not set(names.split()).isdisjoint(facts.names):
            return fault
    if facts.status is not None:
        if facts.status in _FAULT_OF_STATUS:
            return _FAULT_OF_STATUS[facts.status]
        return Fault.TRANSIENT if facts.status >= 500 else Fault.PERMANENT
    if facts.errno is not None:
        return _FAULT_OF_ERRNO.get(facts.errno, Fault.PERMANENT)
    return Fault.PERMANENT


def fault_of(error: BaseException) -> Fault:
    """`classify(facts_of(error))`."""
    return classify(facts_of(error))


_REPORT: dict[Fault, tuple[type[StorageError], str]] = {
    Fault.TRANSIENT: (TransientStorageError, "check that the service can be reached from this host, then start again"),
    Fault.NOT_FOUND: (ObjectNotFoundError, "it does not exist"),
    Fault.NO_BUCKET: (PermanentStorageError, "create the bucket, or correct the URL"),
    Fault.EXISTS: (ObjectExistsError, "it exists already"),
    Fault.DENIED: (
        AccessDeniedError,
        "check that this user, or the credentials in the environment, may read, write, list and delete there",
    ),
    Fault.FULL: (StorageFullError, "free space or raise the quota, then start again"),
    Fault.RANGE: (PermanentStorageError, "the object ends before the range"),
    Fault.PERMANENT: (PermanentStorageError, "trying again cannot help"),
}


def storage_error(fault: Fault, *, action: str, url: str, reason: str) -> StorageError:
    """The error that callers of a store see."""
    kind, remedy = _REPORT[fault]
    return kind(f"cannot {action} {url}: {reason}; {remedy}")


def reason_of(error: BaseException) -> str:
    """One line that says what happened."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
