"""Maps exceptions of backends to kinds of failure, and retries transient ones.

Exceptions are matched by class name: the packages of the backends need not be installed.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

from elastictrain import errors

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Such an exception is a bug in the program, not an answer of a backend.
_BUGS = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError)


class Fault(Enum):
    TRANSIENT = auto()
    NOT_FOUND = auto()
    NO_BUCKET = auto()
    EXISTS = auto()
    DENIED = auto()
    FULL = auto()
    RANGE = auto()  # the range begins behind the end of an object that exists
    PERMANENT = auto()


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
_STATUSES = {
    Fault.DENIED: "401 403",
    Fault.NOT_FOUND: "404",
    Fault.TRANSIENT: "408 409 425 429",
    Fault.EXISTS: "412",
    Fault.RANGE: "416",
    Fault.PERMANENT: "501 505",
    Fault.FULL: "507",
}

# Checked in order: a failed certificate check is also a connection error, but a permanent one.
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


def _by_word(table: Mapping[Fault, str]) -> dict[str, Fault]:
    return {word: fault for fault, words in table.items() for word in words.split()}


_FAULT_OF_CODE, _FAULT_OF_STATUS, _FAULT_OF_ERRNO = _by_word(_CODES), _by_word(_STATUSES), _by_word(_ERRNOS)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and its causes, outermost first."""
    chain = [error]
    while chain[-1].__cause__ is not None and len(chain) < 20:
        chain.append(chain[-1].__cause__)
    return chain


def errno_of(error: BaseException) -> int | None:
    """The errno of the outermost exception, among `error` and its causes, that has one."""
    return next((one.errno for one in _chain(error) if isinstance(one, OSError) and one.errno is not None), None)


def _answer_of(error: BaseException) -> tuple[str, int]:
    """The service's error code (`NoSuchKey`) and the HTTP status, from where each client keeps them; '' and 0 if absent."""
    response: object = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response.get("Error", {}).get("Code") or "", status if isinstance(status, int) else 0
    for attribute in ("status_code", "status", "code"):
        value = str(getattr(error, attribute, ""))
        if value.isdecimal() and 400 <= int(value) < 600:
            code = getattr(error, "error_code", None)
            # Azure's codes are members of a str enum, which a dict lookup does not find.
            code = getattr(code, "value", code)
            return code if isinstance(code, str) else "", int(value)
    return "", 0


def fault_of(error: BaseException) -> Fault:
    """Classify the exception and its causes: by the service's code, then class, then HTTP status, then errno.

    aiohttp gives a torn answer the status 400, and an errno is often the invention of a client.
    """
    chain = _chain(error)
    answers = [_answer_of(one) for one in chain]
    code = next((code for code, _ in answers if code), "")
    if code in _FAULT_OF_CODE:
        return _FAULT_OF_CODE[code]
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    for fault, known in _CLASSES.items():
        if not names.isdisjoint(known.split()):
            return fault
    status = next((status for _, status in answers if status), 0)
    if status:
        return _FAULT_OF_STATUS.get(str(status), Fault.TRANSIENT if status >= 500 else Fault.PERMANENT)
    return _FAULT_OF_ERRNO.get(errno.errorcode.get(errno_of(error) or 0, ""), Fault.PERMANENT)


_REPORT: dict[Fault, tuple[type[errors.StorageError], str]] = {
    Fault.TRANSIENT: (errors.TransientStorageError, "check that the service can be reached from this host, then start again"),
    Fault.NOT_FOUND: (errors.ObjectNotFoundError, "it does not exist"),
    Fault.NO_BUCKET: (errors.PermanentStorageError, "create the bucket, or correct the URL"),
    Fault.EXISTS: (errors.ObjectExistsError, "it exists already"),
    Fault.DENIED: (
        errors.AccessDeniedError,
        "check that this user, or the credentials in the environment, may read, write, list and delete there",
    ),
    Fault.FULL: (errors.StorageFullError, "free space or raise the quota, then start again"),
    Fault.RANGE: (errors.PermanentStorageError, "the object ends before the range"),
    Fault.PERMANENT: (errors.PermanentStorageError, "trying again cannot help"),
}


def storage_error(fault: Fault, *, action: str, url: str, reason: str) -> errors.StorageError:
    kind, remedy = _REPORT[fault]
    return kind(f"cannot {action} {url}: {reason}; {remedy}")


def reason_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """Limits of retries. A request may exceed `total_s` by the time-out of its last attempt."""

    attempts: int = 12  # attempts in all; 1 for no second one
    base_s: float = 0.25  # upper bound of the first pause; it doubles with each attempt
    max_delay_s: float = 8.0  # upper bound of any pause
    total_s: float = 60.0  # no attempt begins later than this after the first one
    answer_timeout_s: float = 20.0  # an attempt fails after so long without an answer; large bodies get time in addition


def next_delay(attempt: int, *, elapsed_s: float, options: RetryOptions, fault: Fault, jitter: float) -> float | None:
    """Pause before the next attempt; None to give up.

    Attempt `attempt` (from 1) has just failed. `jitter` in [0, 1) spreads clients that failed together over the upper half of
    the pause.
    """
    if fault is not Fault.TRANSIENT or attempt >= options.attempts:
        return None
    longest = min(options.max_delay_s, options.base_s * 2.0 ** min(attempt - 1, 60))
    delay = longest * (0.5 + 0.5 * jitter)
    return delay if elapsed_s + delay <= options.total_s else None


def system_random() -> float:
    """In [0, 1). Not from `random`: a failure in one thread must not change what a task draws in another."""
    return int.from_bytes(os.urandom(4)) / 2**32


@dataclass(frozen=True, slots=True)
class Retrying:
    """Runs a request until it succeeds or a retry is pointless."""

    options: RetryOptions
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = system_random

    def once(self) -> "Retrying":
        """Return a copy without retries, which only translates errors."""
        return replace(self, options=replace(self.options, attempts=1))

    def call(self, request: Callable[[], T], *, action: str, url: str) -> T:
        """Return the result of `request`. Raises: StorageError, made from the last error of the backend."""
        began = self.clock()
        attempt = 1
        while True:
            try:
                return request()
            except (errors.StorageError, *_BUGS):
                raise
            except Exception as error:
                fault = fault_of(error)
                elapsed_s = self.clock() - began
                delay = next_delay(attempt, elapsed_s=elapsed_s, options=self.options, fault=fault, jitter=self.random())
                reason = reason_of(error)
                if delay is None:
                    if fault is Fault.TRANSIENT:
                        reason += f" (attempt {attempt}, after {elapsed_s:.0f} s)"
                    raise storage_error(fault, action=action, url=url, reason=reason) from error
            level = logging.WARNING if attempt == 1 else logging.DEBUG
            logger.log(level, "cannot %s %s: %s; trying again for up to %g s", action, url, reason, self.options.total_s)
            self.sleep(delay)
            attempt += 1
