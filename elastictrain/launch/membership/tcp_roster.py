"""A launcher's connection to the host that serves the roster: objects, as a registry needs them, with an answer or an error
within `limit_s` whatever the other side does."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

from elastictrain.checkpoint.peers.wire import Channel, WireError
from elastictrain.config.roster_address import RosterAddress
from elastictrain.distributed.bounded import within
from elastictrain.errors import PermanentStorageError, TransientStorageError
from elastictrain.launch.membership.tcp_frames import ANSWER_BYTES, Frames, Json, Message, begin_as_client
from elastictrain.launch.membership.tcp_server import ERRORS
from elastictrain.storage.failures import reason_of
from elastictrain.storage.store import ObjectInfo

LIMIT_S = 4.0
"""For one request, with the look-up of the name, the connection and the answer."""


class TcpRoster:
    """Safe to use from several threads; one request is under way at a time."""

    def __init__(
        self, address: RosterAddress, *, token: bytes, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = str(address)
        self._address = address
        self._token = token
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._frames: Frames | None = None
        self._brought: dict[str, bytes] = {}
        """What the last list brought along; each is given out once, since a later read means a later state."""

    def write(self, key: str, data: bytes) -> None:
        """As `Objects`."""
        self._ask("write", key, data)

    def create(self, key: str, data: bytes) -> None:
        """As `Objects`."""
        self._ask("create", key, data)

    def read(self, key: str) -> bytes:
        """As `Objects`; right after a list it is what was there when that was made."""
        with self._lock:
            if (brought := self._brought.pop(key, None)) is not None:
                return brought
        return self._ask("read", key).data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `Objects`."""
        answer = self._ask("list", prefix)
        try:
            infos, brought = _read_list(answer)
        except (ValueError, TypeError) as error:
            raise PermanentStorageError(f"{self.url}/{prefix} cannot be listed: {error}") from error
        with self._lock:
            self._brought = brought
        return iter(infos)

    def delete(self, key: str) -> None:
        """As `Objects`."""
        self._ask("delete", key)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._hang_up()

    def _ask(self, what: str, key: str, data: bytes = b"") -> Message:
        """Raises: StorageError."""
        deadline_s = self._clock() + self._limit_s
        request = Message({"do": what, "key": key}, data)
        if not self._lock.acquire(timeout=self._limit_s):
            raise TransientStorageError(f"{self.url} is too slow")
        try:
            self._brought.pop(key, None)
            answer = self._exchange(request, deadline_s)
        except (WireError, OSError) as error:
            self._hang_up()
            raise TransientStorageError(f"{self.url} cannot be reached: {reason_of(error)}") from error
        finally:
            self._lock.release()
        if "error" in answer.header:
            kind = ERRORS.get(str(answer.header["error"]), PermanentStorageError)
            raise kind(str(answer.header.get("why", "")))
        return answer

    def _exchange(self, request: Message, deadline_s: float) -> Message:
        """Raises: OSError, WireError."""
        if self._frames is not None:
            try:
                return self._once(self._frames, request, deadline_s)
            except WireError:
                # The server was started again, or has hung up on one that was silent for long. Every request may be repeated:
                # whoever creates what is there already looks whose it is.
                self._hang_up()
                if self._clock() >= deadline_s:
                    raise
        self._channel = Channel(self._connect(deadline_s))
        frames = begin_as_client(self._channel, self._token, limit_s=deadline_s - self._clock())
        try:
            answer = self._once(frames, request, deadline_s)
        except WireError as error:
            if self._clock() >= deadline_s:
                raise
            raise WireError(f"{error}, as the roster of another run does") from error
        self._frames = frames
        return answer

    def _once(self, frames: Frames, request: Message, deadline_s: float) -> Message:
        frames.send(request, limit_s=max(0.001, deadline_s - self._clock()))
        return frames.receive(most_bytes=ANSWER_BYTES, limit_s=deadline_s - self._clock())

    def _connect(self, deadline_s: float) -> socket.socket:
        """To whichever of the address's answers. Raises: OSError."""
        addresses = look_up(self._address, limit_s=deadline_s - self._clock())
        refused: OSError = TimeoutError("timed out")
        for number, (host, port) in enumerate(addresses):
            left_s = (deadline_s - self._clock()) / (len(addresses) - number)
            if left_s <= 0:
                break
            try:
                return socket.create_connection((host, port), timeout=left_s)
            except OSError as error:
                refused = error
        raise refused

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._frames = None


def look_up(address: RosterAddress, *, limit_s: float) -> list[tuple[str, int]]:
    """All addresses, each once, in the order of the resolver. Raises: OSError."""
    if address.literal is not None:
        return [(address.host, address.port)]
    failures: list[OSError] = []

    def ask() -> list[tuple[str, int]]:
        try:
            rows = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            failures.append(error)
            return []
        return list(dict.fromkeys((str(row[4][0]), address.port) for row in rows))

    found = within(limit_s, ask)
    if not found:
        raise failures[0] if failures else TimeoutError(f"the name {address.host} is not looked up in time")
    return found


def _read_list(answer: Message) -> tuple[list[ObjectInfo], dict[str, bytes]]:
    """Raises: ValueError, TypeError."""
    rows: Json = answer.header.get("objects")
    if not isinstance(rows, list):
        raise ValueError("the answer is no list")
    infos: list[ObjectInfo] = []
    brought: dict[str, bytes] = {}
    position = 0
    for row in rows:
        match row:
            case [str(key), int(size_bytes), int() | float() as modified, bool(is_here)]:
                infos.append(ObjectInfo(key, size_bytes, float(modified)))
                if is_here:
                    brought[key] = answer.data[position : position + size_bytes]
                    position += size_bytes
            case _:
                raise ValueError("a row of the list is none")
    return infos, brought
