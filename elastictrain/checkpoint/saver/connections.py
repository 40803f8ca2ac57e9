"""The saver's side of the Unix socket: connections of workers, and processes whose end the saver watches."""

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from elastictrain.bounded_json import JsonLines, MalformedJsonError
from elastictrain.checkpoint.saver.messages import ToSaver, ToWorker, WorkerRefused, encode
from elastictrain.checkpoint.saver.process import SOCKET_NAME, peer_pid, through_folder
from elastictrain.net.server import PendingConnections, PendingLimits
from elastictrain.processes import PROC, read_stat

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class WorkerConnection:
    socket: socket.socket
    pid: int = 0
    lines: JsonLines[ToSaver] = field(default_factory=lambda: JsonLines(ToSaver))  # type: ignore[arg-type]
    rank: int = -1
    incarnation: str = ""
    said_goodbye: bool = False
    asks_to_flush: bool = False  # from a launcher that waits for the final save
    told_flushed: bool = False


class WorkerConnections:
    """Listens; `turn` calls the callbacks, in the caller's thread."""

    def __init__(
        self,
        folder: str,
        *,
        on_message: Callable[[WorkerConnection, ToSaver], None],
        on_gone: Callable[[WorkerConnection], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._folder = folder
        self._on_message = on_message
        self._on_gone = on_gone
        self._selector = selectors.DefaultSelector()
        self._connections: list[WorkerConnection] = []
        self._pending: PendingConnections[WorkerConnection] = PendingConnections(PendingLimits())
        self.agents: set[int] = set()  # watched processes that are alive
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with suppress(FileNotFoundError):
            os.unlink(f"{folder}/{SOCKET_NAME}")  # noqa: PTH108  # of a saver that was killed: we hold the lock
        through_folder(folder, self._listener.bind)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, lambda: os.read(self._wake_reader, 4096))

    @property
    def connections(self) -> list[WorkerConnection]:
        """Connected workers that have sent their hello."""
        return [one for one in self._connections if one.rank >= 0]

    @property
    def asking(self) -> list[WorkerConnection]:
        """Launchers that wait for the final save."""
        return [one for one in self._connections if one.asks_to_flush]

    def wake(self) -> None:
        """End the wait of `turn`; from any thread."""
        with suppress(OSError):
            os.write(self._wake_writer, b"x")

    def watch(self, pid: int) -> None:
        """Count a process among the agents until its end."""
        if pid not in self.agents:
            self.agents.add(pid)
            self.when_ended(pid, lambda: self.agents.discard(pid))

    def when_ended(self, pid: int, then: Callable[[], None]) -> None:
        """Call `then` once a process has ended; at once if it has ended already, or is exiting."""
        descriptor = -1

        def ended() -> None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            then()

        # A number that no process can have overflows.
        with suppress(OSError, OverflowError):
            descriptor = os.pidfd_open(pid)
            self._selector.register(descriptor, selectors.EVENT_READ, ended)
        if descriptor < 0:
            then()
        elif (stat := read_stat(PROC / str(pid))) is None or stat.exiting:
            # It is irreversibly exiting, but releasing its GPU memory can take it long after that.
            ended()

    def turn(self, timeout_s: float) -> None:
        """Wait for events up to `timeout_s`, and handle them."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        # Last: all that came while this process was stopped has been read by now.
        for one in self._pending.take_overdue(now_s=self._clock()):
            self._drop(one)

    def send_all(self, message: ToWorker) -> None:
        for one in self.connections:
            self.send(one, message)

    def send(self, one: WorkerConnection, message: ToWorker) -> None:
        """Send to one worker; a worker that does not read loses the connection."""
        try:
            one.socket.sendall(encode(message))
        except OSError as error:
            logger.warning("rank %d does not read its messages (%s)", one.rank, error)
            self._drop(one)

    def stop_listening(self) -> None:
        """Accept no more connections; a worker whose connection was not accepted yet loses it, and starts another saver."""
        with suppress(KeyError):
            self._selector.unregister(self._listener)
        with suppress(OSError):
            os.unlink(f"{self._folder}/{SOCKET_NAME}")  # noqa: PTH108
        self._listener.close()

    def close(self) -> None:
        for one in self._connections:
            one.socket.close()
        self._connections.clear()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        # A stopped worker must not block the saver.
        connection.settimeout(1.0)
        one = WorkerConnection(connection, peer_pid(connection))
        self._connections.append(one)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(one))
        # Only processes of this user reach the socket; a faulty one must not keep the workers out.
        given_up = self._pending.add(one, address=str(one.pid), now_s=self._clock())
        if given_up is not None:
            self._drop(given_up)

    def _read(self, one: WorkerConnection) -> None:
        try:
            data = one.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return
        try:
            for message in one.lines.feed(data):
                self._on_message(one, message)
        except MalformedJsonError as error:
            logger.warning("a connection is closed: %s", error)
            # A refused worker must not reconnect again and again.
            self.send(one, WorkerRefused(str(error)))
            self._drop(one)
        if one.rank >= 0 or one.asks_to_flush:
            self._pending.remove(one)

    def _drop(self, one: WorkerConnection) -> None:
        self._pending.remove(one)
        if one in self._connections:
            self._connections.remove(one)
            with suppress(KeyError, ValueError):
                self._selector.unregister(one.socket)
            one.socket.close()
            if one.rank >= 0:
                self._on_gone(one)
