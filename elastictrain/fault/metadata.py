"""Asks the metadata service of a cloud: plain HTTP to a link-local address, past any proxy, within a bounded time."""

import http.client
import socket
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

ADDRESS = "http://169.254.169.254"
"""The same at AWS, GCP and Azure."""

TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20


class MetadataError(Exception):
    """The service does not answer, or not in a way that means anything; asking again may help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service said; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class MetadataService:
    """One address at which to ask."""

    def __init__(self, base_url: str = ADDRESS, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._timeout_s = timeout_s
        self.url = base_url

    def ask(self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        """Raises: MetadataError if there is no whole answer in time, whatever its status."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        # Time-outs of sockets count from each byte, so that a service which drips would hold us for ever.
        overdue = threading.Event()
        limit: threading.Timer | None = None
        try:
            connection.connect()
            # The connection forgets its socket as soon as an answer says that it is the last.
            limit = threading.Timer(self._timeout_s, _break_off, args=(connection.sock, overdue))
            limit.daemon = True
            limit.start()
            connection.request(method, path, headers=dict(headers or {}))
            # One without a length keeps the socket to itself.
            with closing(connection.getresponse()) as response:
                body = response.read(_MOST_BYTES + 1)
            if len(body) > _MOST_BYTES:
                raise MetadataError(f"{self.url}{path} answers with more than {_MOST_BYTES} bytes")
            if overdue.is_set():
                # A body without a length ends where the connection does, and may have been cut.
                raise TimeoutError
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = overdue.is_set() or isinstance(error, TimeoutError)
            reason = f"no answer within {self._timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            raise MetadataError(f"{self.url}{path}: {reason}") from error
        finally:
            if limit is not None:
                limit.cancel()
            connection.close()


def unexpected(service: MetadataService, path: str, answer: Answer) -> MetadataError:
    """An answer of which nothing can be made."""
    return MetadataError(f"{service.url}{path} answers {answer.status}: {answer.body[:100]!r}")


def _break_off(connection: socket.socket, overdue: threading.Event) -> None:
    overdue.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
