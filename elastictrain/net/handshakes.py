"""Listens, and lets in who proves that it belongs to the run. One thread does this for all connections that have not yet.

A connection that is silent costs one descriptor for two seconds at most, and no thread: thousands of them keep nobody out.
"""

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from elastictrain.net.pending import PendingConnections, PendingLimits

logger = logging.getLogger(__name__)

BACKLOG = 1024

_ACCEPTED_AT_ONCE = 16
"""Between two looks at who has sent its proof: a flood of new connections must not be older than that."""

_TURN_S = 0.25
_FULL_S = 0.05
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Handshake(Protocol):
    """The server's side of one. All that it sends fits into the buffer of a new connection."""

    @property
    def greeting(self) -> bytes:
        """What the server says first."""

    @property
    def num_bytes(self) -> int:
        """How many bytes the other side answers with."""

    def answer(self, heard: bytes) -> bytes | None:
        """What the server says to one that belongs to the run; None for any other."""


H = TypeVar("H", bound=Handshake)


@dataclass(eq=False, slots=True)
class _Pending(Generic[H]):
    """One connection that is not authenticated yet."""

    socket: socket.socket
    address: str
    handshake: H
    heard: bytearray = field(default_factory=bytearray)


class HandshakeListener(Generic[H]):
    """Hands out authenticated connections, from a thread of its own, until `close`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        handshake: Callable[[], H],
        on_admitted: Callable[[socket.socket, str, H], None],
        is_ready: Callable[[], bool] = lambda: True,
        limits: PendingLimits | None = None,
        name: str = "handshakes",
    ) -> None:
        """`on_admitted`: gets the connection, its address and its handshake, and must not wait. It owns the connection.

        While `is_ready` says no, proofs are kept; `wake` has it asked again.
        """
        self._listeners = tuple(listeners)
        self._handshake = handshake
        self._on_admitted = on_admitted
        self._is_ready = is_ready
        self._pending: PendingConnections[_Pending[H]] = PendingConnections(limits or PendingLimits())
        self._complete: dict[_Pending[H], None] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._told_full = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def start(self) -> None:
        """Begin to let in."""
        self._thread.start()

    def wake(self) -> None:
        """From any thread: `is_ready` may say something else now."""
        with suppress(OSError):
            os.write(self._wake_writer, b"x")

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop listening and hang up on whoever is not admitted yet; whether the thread ended within the time."""
        self._closing.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        while (one := self._pending.give_up_oldest()) is not None:
            one.socket.close()
        for listener in self._listeners:
            listener.close()
        if self._wake_reader >= 0:
            self._selector.close()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_reader = self._wake_writer = -1
        return True

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:
                # The edge of the thread: nothing that comes over the network may close the door.
                logger.exception("a turn of letting connections in fails")
                self._closing.wait(_FULL_S)

    def _turn(self) -> None:
        events = [key for key, _ in self._selector.select(_TURN_S)]
        # Proofs first: a flood of new connections must not give up one whose proof is here already.
        for key in events:
            if isinstance(key.data, _Pending):
                self._read(key.data)
        if self._complete and self._is_ready():
            for one in list(self._complete):
                self._judge(one)
        for key in events:
            if key.fd == self._wake_reader:
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
            elif isinstance(key.fileobj, socket.socket) and key.data is None:
                self._accept(key.fileobj)
        # Last: whose proof came while this process was stopped has been read by now.
        for one in self._pending.take_overdue(now_s=time.monotonic()):
            self._drop(one)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, place = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._make_room(error)
                return
            self._told_full = False
            connection.setblocking(False)
            one = _Pending(connection, str(place[0]), self._handshake())
            given_up = self._pending.add(one, address=one.address, now_s=time.monotonic())
            if given_up is not None:
                self._drop(given_up)
            try:
                with suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(one.handshake.greeting)
                self._selector.register(connection, selectors.EVENT_READ, one)
            except OSError:
                self._drop(one)

    def _make_room(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM:
            # A connection that was gone before it was accepted.
            return
        oldest = self._pending.give_up_oldest()
        if oldest is not None:
            self._drop(oldest)
            return
        if not self._told_full:
            logger.warning("a connection cannot be let in: %s", error)
            self._told_full = True
        self._closing.wait(_FULL_S)

    def _read(self, one: _Pending[H]) -> None:
        wanted = one.handshake.num_bytes - len(one.heard)
        try:
            data = one.socket.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return
        one.heard += data
        if len(data) == wanted:
            # Nothing more is read: what it says next is for whoever it is handed to.
            self._selector.unregister(one.socket)
            self._complete[one] = None

    def _judge(self, one: _Pending[H]) -> None:
        answer = one.handshake.answer(bytes(one.heard))
        if answer is None:
            logger.debug("a connection from %s is closed: it does not have the token", one.address)
            self._drop(one)
            return
        self._pending.remove(one)
        del self._complete[one]
        try:
            one.socket.sendall(answer)
            one.socket.setblocking(True)
            self._on_admitted(one.socket, one.address, one.handshake)
        except (OSError, RuntimeError) as error:
            # It has left, or there can be no more threads.
            logger.debug("a connection from %s ended: %s", one.address, error)
            one.socket.close()

    def _drop(self, one: _Pending[H]) -> None:
        self._pending.remove(one)
        self._complete.pop(one, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(one.socket)
        one.socket.close()
