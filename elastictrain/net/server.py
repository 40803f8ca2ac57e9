"""Listens, authenticates connections, and serves each in a thread of its own.

One thread does all handshakes. A silent connection costs one descriptor for two seconds at most, and no thread: thousands of
them keep no host out.
"""

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from elastictrain.net.channel import PROOF_BYTES, Channel, ChannelError, Handshake, Secret

logger = logging.getLogger(__name__)

CONNECTIONS = 64  # served at once, by a thread each; further authenticated ones wait for a place
_ACCEPTED_AT_ONCE = 16  # accepted between two reads of proofs, so that a flood does not push out a connection with a proof
_TURN_S = 0.25
_FULL_S = 0.05
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLimits:
    """Limits of connections that are not authenticated yet.

    Hosts of a run may share one address with strangers, behind a gateway.
    """

    handshake_s: float = 2.0  # from accepting a connection to its proof
    most: int = 256
    most_per_address: int = 128


class PendingConnections(Generic[K]):
    """Connections that are not authenticated yet, oldest first.

    A new one is always accepted: silent strangers cannot keep others out. If there are too many, the oldest one of the address
    that has the most is dropped, so that few addresses with many connections harm only themselves.
    """

    def __init__(self, limits: PendingLimits) -> None:
        self._limits = limits
        self._known: dict[K, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, connection: K, *, address: str, now_s: float) -> K | None:
        """Accept a connection; return the one that is dropped for it, if there is one."""
        self._known[connection] = (address, now_s)
        counts = Counter(known for known, _ in self._known.values())
        if counts[address] > self._limits.most_per_address:
            crowded = {address}
        elif len(self._known) > self._limits.most:
            largest = max(counts.values())
            crowded = {known for known, count in counts.items() if count == largest}
        else:
            return None
        given_up = next(one for one, (known, _) in self._known.items() if known in crowded)
        del self._known[given_up]
        return given_up

    def remove(self, connection: K) -> None:
        """The connection is authenticated, or closed."""
        self._known.pop(connection, None)

    def give_up_oldest(self) -> K | None:
        """Drop and return the oldest one, for a process without room for another connection."""
        oldest = next(iter(self._known), None)
        if oldest is not None:
            del self._known[oldest]
        return oldest

    def take_overdue(self, *, now_s: float) -> list[K]:
        """Drop and return the connections that are older than `handshake_s`."""
        overdue = [one for one, (_, since_s) in self._known.items() if now_s - since_s > self._limits.handshake_s]
        for one in overdue:
            self.remove(one)
        return overdue


@dataclass(eq=False, slots=True)
class _Pending:
    socket: socket.socket
    address: str
    greeting: bytes
    received: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class ChannelServer:
    """Serves authenticated connections until `close`. Before the first `set_secret` it keeps proofs undecided."""

    listeners: Sequence[socket.socket]
    _: KW_ONLY
    handshake: Handshake
    serve: Callable[[Channel], None]  # runs in a thread per connection; a ChannelError ends it quietly
    connections: int = CONNECTIONS
    place_s: float  # longest wait for a free place
    limits: PendingLimits = field(default_factory=PendingLimits)
    name: str

    def __post_init__(self) -> None:
        self._places = threading.Semaphore(self.connections)
        self._secret: Secret | None = None
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._pending: PendingConnections[_Pending] = PendingConnections(self.limits)
        self._complete: set[_Pending] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._told_full = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        for listener in self.listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def start(self) -> None:
        self._thread.start()

    def set_secret(self, secret: Secret) -> None:
        """From any thread: admit only clients with this secret from now on, and end connections under another one."""
        with self._lock:
            outdated = list(self._channels) if secret != self._secret else []
            self._secret = secret
        for channel in outdated:
            channel.break_off()
        self._wake()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop listening and hang up on every client; whether all threads ended within the time."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        listening = self._thread.is_alive()
        if not listening:
            while (one := self._pending.give_up_oldest()) is not None:
                one.socket.close()
            for listener in self.listeners:
                listener.close()
            if self._wake_reader >= 0:
                self._selector.close()
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._wake_reader = self._wake_writer = -1
        with self._lock:
            served = list(self._channels)
        for channel in served:
            channel.break_off()
        while self._channels and time.monotonic() < deadline:
            time.sleep(0.01)
        return not listening and not self._channels

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_writer, b"x")

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:
                # The edge of the thread: no input from the network may stop the server.
                logger.exception("a turn of letting connections in fails")
                self._closing.wait(_FULL_S)

    def _turn(self) -> None:
        events = [key for key, _ in self._selector.select(_TURN_S)]
        # Proofs first: a flood of new connections must not push out one whose proof has arrived.
        for key in events:
            if isinstance(key.data, _Pending):
                self._read(key.data)
        if (secret := self._secret) is not None:
            for one in list(self._complete):
                self._judge(one, secret)
        for key in events:
            if key.fd == self._wake_reader:
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
            elif isinstance(key.fileobj, socket.socket) and key.data is None:
                self._accept(key.fileobj)
        # Last: a proof that arrived while this process was stopped has been read by now.
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
            one = _Pending(connection, str(place[0]), self.handshake.greeting())
            if (given_up := self._pending.add(one, address=one.address, now_s=time.monotonic())) is not None:
                self._drop(given_up)
            try:
                # All bytes that a handshake sends fit into the buffer of a new connection.
                connection.sendall(one.greeting)
                self._selector.register(connection, selectors.EVENT_READ, one)
            except OSError:
                self._drop(one)

    def _make_room(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM:
            # The connection ended before it was accepted.
            return
        if (oldest := self._pending.give_up_oldest()) is not None:
            self._drop(oldest)
            return
        if not self._told_full:
            logger.warning("cannot accept a connection: %s", error)
            self._told_full = True
        self._closing.wait(_FULL_S)

    def _read(self, one: _Pending) -> None:
        wanted = len(one.greeting) + PROOF_BYTES - len(one.received)
        try:
            data = one.socket.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return
        one.received += data
        if len(data) == wanted:
            # Read no further: the next bytes are for `serve`.
            self._selector.unregister(one.socket)
            self._complete.add(one)

    def _judge(self, one: _Pending, secret: Secret) -> None:
        answer = self.handshake.prove(secret, greeting=one.greeting, received=bytes(one.received))
        if answer is None:
            logger.debug("a connection from %s is closed: it does not have the token", one.address)
            self._drop(one)
            return
        self._pending.remove(one)
        self._complete.remove(one)
        channel = Channel(one.socket)
        with self._lock:
            # `set_secret` may have replaced the secret meanwhile, without knowing this channel.
            if secret != self._secret:
                channel.close()
                return
            self._channels.add(channel)
        try:
            one.socket.sendall(answer)
            one.socket.setblocking(True)
            threading.Thread(target=self._serve, args=(channel, one.address), name=self.name, daemon=True).start()
        except (OSError, RuntimeError) as error:
            # The client hung up, or this process cannot start more threads.
            logger.debug("a connection from %s ended: %s", one.address, error)
            self._forget(channel)

    def _serve(self, channel: Channel, address: str) -> None:
        placed = self._places.acquire(timeout=self.place_s)
        try:
            if placed and not self._closing.is_set():
                self.serve(channel)
        except ChannelError as error:
            logger.debug("a connection from %s ended: %s", address, error)
        except Exception:
            # The edge of the thread: no input from the network may end this process.
            logger.exception("a connection from %s is closed", address)
        finally:
            self._forget(channel)
            if placed:
                self._places.release()

    def _forget(self, channel: Channel) -> None:
        channel.close()
        with self._lock:
            self._channels.discard(channel)

    def _drop(self, one: _Pending) -> None:
        self._pending.remove(one)
        self._complete.discard(one)
        with suppress(KeyError, ValueError):
            self._selector.unregister(one.socket)
        one.socket.close()
