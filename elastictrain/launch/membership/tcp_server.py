"""The roster's server: threads in the launcher of the host that has the address. It does nothing that is not signed."""

import errno
import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.checkpoint.peers.wire import Channel, WireError
from elastictrain.config.roster_address import RosterAddress
from elastictrain.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    Problem,
    StorageError,
    TransientStorageError,
)
from elastictrain.launch.membership.kept import KeptObjects
from elastictrain.launch.membership.objects import Objects
from elastictrain.launch.membership.tcp_frames import REQUEST_BYTES, Frames, Json, Message, begin_as_server
from elastictrain.storage.failures import reason_of

logger = logging.getLogger(__name__)

ERRORS: Mapping[str, type[StorageError]] = {
    "exists": ObjectExistsError,
    "missing": ObjectNotFoundError,
    "transient": TransientStorageError,
}
"""What an answer may say instead of a result; anything else is for ever."""

_BROUGHT_BYTES = 8 << 20
"""A list brings along what it lists, up to so much: a reading of all lines is then one request."""

_AGAIN_S = 0.5
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How much of this host others may take up."""

    connections: int = 1024
    """Launchers; each has one connection, and one thread here."""

    strangers: int = 64
    """Connections over which nothing that is signed has come yet."""

    frame_s: float = 5.0
    """How long a frame may take from its first byte to its last, and the first one altogether."""

    idle_s: float = 120.0
    """How long a launcher may be silent; it comes again when it needs something."""


class RosterServer:
    """Listens from `start` to `close`. While something else has the port it tries again: that may be an earlier launcher."""

    def __init__(self, address: RosterAddress, store: Objects, *, token: bytes, limits: ServerLimits | None = None) -> None:
        self._address = address
        self._store = store
        self._token = token
        self._limits = limits or ServerLimits()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._strangers = 0
        self._listening: socket.socket | None = None
        self._closed = threading.Event()
        self.objects: KeptObjects | None = None
        """None until it serves."""

        self._thread = threading.Thread(target=self._run, name="roster server", daemon=True)

    def start(self) -> None:
        """Begin.

        Raises: ConfigError if this host can never serve at this address; StorageError if the run's storage cannot be read.
        """
        try:
            self._open()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                message = (
                    f"is {self._address}, where this host cannot listen: {reason_of(error)}; choose another port or address"
                )
                raise ConfigError([Problem("launch.roster", message)]) from error
        self._thread.start()

    def close(self, *, limit_s: float) -> None:
        """Hang up, and bring to storage what belongs there."""
        self._closed.set()
        if self._listening is not None:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.break_off()
        if self._thread.is_alive():
            self._thread.join(timeout=limit_s)
        if self._listening is not None:
            self._listening.close()
        if self.objects is not None:
            self.objects.close(limit_s=limit_s)

    def _open(self) -> None:
        """Nobody is let in before it is known what storage holds. Raises: OSError, StorageError."""
        listening = _bound_socket(self._address)
        try:
            objects = KeptObjects(self._store, url=str(self._address))
            objects.load()
            listening.settimeout(_AGAIN_S)
            listening.listen(_BACKLOG)
            objects.start()
        except BaseException:
            listening.close()
            raise
        self.objects, self._listening = objects, listening

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._listening is None:
                    self._open()
                else:
                    self._let_in(self._listening.accept()[0])
            except TimeoutError:
                continue
            except (OSError, StorageError):
                # The port is taken, storage is away, or there are too many open files for now.
                self._closed.wait(_AGAIN_S)

    def _let_in(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        with self._lock:
            full = len(self._channels) >= self._limits.connections or self._strangers >= self._limits.strangers
            if not full and not self._closed.is_set():
                self._channels.add(channel)
                self._strangers += 1
        if full or self._closed.is_set():
            channel.close()
            return
        thread = threading.Thread(target=self._serve, args=(channel,), name="roster connection", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No more threads: whoever hung on comes again.
            self._leave(channel, stranger=True)

    def _serve(self, channel: Channel) -> None:
        stranger, limits = True, self._limits
        try:
            until_s = time.monotonic() + limits.frame_s
            frames = begin_as_server(channel, self._token, limit_s=limits.frame_s)
            request = frames.receive(most_bytes=REQUEST_BYTES, limit_s=until_s - time.monotonic())
            with self._lock:
                self._strangers -= 1
                stranger = False
            while True:
                self._answer(frames, request)
                request = frames.receive(most_bytes=REQUEST_BYTES, limit_s=limits.frame_s, idle_s=limits.idle_s)
        except WireError as error:
            logger.debug("a connection to the roster ends: %s", error)
        except Exception as error:  # noqa: BLE001  # the edge of a thread: one connection ends, and the others go on
            logger.warning("a connection to the roster ends: %s: %s", type(error).__name__, reason_of(error))
        finally:
            self._leave(channel, stranger=stranger)

    def _leave(self, channel: Channel, *, stranger: bool) -> None:
        with self._lock:
            self._channels.discard(channel)
            self._strangers -= stranger
        channel.close()

    def _answer(self, frames: Frames, request: Message) -> None:
        assert self.objects is not None  # noqa: S101
        try:
            answer = answer_to(request, self.objects)
        except StorageError as error:
            kind = next((name for name, cls in ERRORS.items() if isinstance(error, cls)), "refused")
            answer = Message({"error": kind, "why": str(error)})
        frames.send(answer, limit_s=self._limits.frame_s)


def answer_to(request: Message, objects: KeptObjects) -> Message:
    """Do what is asked.

    Raises: StorageError; WireError if this is no request.
    """
    what, key = request.header.get("do"), request.header.get("key")
    if not isinstance(key, str):
        raise WireError("a request names no object")
    match what:
        case "write":
            objects.write(key, request.data)
        case "create":
            objects.create(key, request.data)
        case "read":
            return Message({}, objects.read(key))
        case "delete":
            objects.delete(key)
        case "list":
            return _list(objects, key)
        case _:
            raise WireError(f"{what!r} is no request")
    return Message({})


def _list(objects: KeptObjects, prefix: str) -> Message:
    rows: list[Json] = []
    pieces: list[bytes] = []
    left_bytes = _BROUGHT_BYTES
    for kept in objects.below(prefix):
        data = kept.data if kept.data is not None and len(kept.data) <= left_bytes else None
        if data is not None:
            left_bytes -= len(data)
            pieces.append(data)
        rows.append([kept.info.key, kept.info.size_bytes, kept.info.modified, data is not None])
    return Message({"objects": rows}, b"".join(pieces))


def _bound_socket(address: RosterAddress) -> socket.socket:
    """At the address itself; where it has a name, which may mean something else here than elsewhere, at all of this host's."""
    literal = address.literal
    family = socket.AF_INET if literal is not None and literal.version == 4 else socket.AF_INET6
    try:
        return _bind(family, address.host if literal is not None else "::", address.port, both=literal is None)
    except OSError as error:
        if literal is not None or error.errno == errno.EADDRINUSE:
            raise
        return _bind(socket.AF_INET, "", address.port)


def _bind(family: socket.AddressFamily, host: str, port: int, *, both: bool = False) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both))
        # Without it the connections of an earlier server, which nobody has any more, would keep the port for a minute.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
