"""One per host: answers whoever has the preflight's token, on real ports of the address that the plan chose."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from elastictrain.errors import HostUnfitError
from elastictrain.net.handshakes import BACKLOG, HandshakeListener
from elastictrain.preflight.links.rates import ProcessorWait, drain
from elastictrain.preflight.links.wire import (
    CHUNK_BYTES,
    ECHO,
    GIVE,
    PING,
    PONG,
    RECEIPT,
    REQUEST,
    SINK,
    TRAILER,
    Line,
    LineError,
    ResponderHandshake,
    Secret,
    answer_frame,
)

logger = logging.getLogger(__name__)

CONNECTIONS = 64
"""Served at once, by a thread each; more that have the token wait for a place."""

_LARGEST_DATAGRAM = 1 << 16
_IDLE_S = 2.0
_MOST_PINGS = 1000
_LATE_S = 0.2
_STALL_S = 10.0


class Responder:
    """Listens from `start` to `close`. Whoever comes before there is a token waits a moment for it."""

    def __init__(
        self,
        address: str,
        *,
        ports: Sequence[int] = (0,),
        connections: int = CONNECTIONS,
        most_seconds: float = 10.0,
        wall: Callable[[], float] = time.time,
        nonce: bytes | None = None,
    ) -> None:
        """`ports`: for TCP, 0 is any free one. `most_seconds`: of one stream. `wall`: the clock that others compare with."""
        self.nonce = secrets.token_bytes(16) if nonce is None else nonce
        self.tcp_ports: tuple[int, ...] = ()
        self.udp_port = 0
        self._address = address
        self._wanted = tuple(ports)
        self._most_seconds = most_seconds
        self._wall = wall
        self._free = threading.Semaphore(connections)
        self._secret: Secret | None = None
        self._doors: list[HandshakeListener[ResponderHandshake]] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Raises: HostUnfitError naming address and port."""
        try:
            for port in self._wanted:
                self._listen(port)
            self._listen_for_datagrams()
        except OSError as error:
            self.close()
            raise HostUnfitError(
                f"link checks must listen on {self._address}, ports {list(self._wanted)} (0: any), but cannot: "
                f"{error.strerror or error}; choose an address of this host and ports that are free"
            ) from error

    def set_token(self, token: bytes) -> None:
        """From now on those who have it are answered."""
        self._secret = Secret(token, self.nonce)
        for door in self._doors:
            door.wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """End everything at once: nobody is waited for, but for our own threads."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        for door in self._doors:
            door.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            found = list(self._open)
        for one in found:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._wake_datagrams()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for one in found:
            one.close()

    def _listen(self, port: int) -> None:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, port), family=family, backlog=BACKLOG)
        self.tcp_ports += (listener.getsockname()[1],)
        door = HandshakeListener(
            [listener],
            handshake=lambda: ResponderHandshake(lambda: self._secret),
            on_admitted=self._admit,
            is_ready=lambda: self._secret is not None,
            name="links",
        )
        self._doors.append(door)
        door.start()

    def _listen_for_datagrams(self) -> None:
        family, kind, _, _, place = socket.getaddrinfo(self._address, 0, type=socket.SOCK_DGRAM)[0]
        datagrams = socket.socket(family, kind)
        self._open.add(datagrams)
        datagrams.bind(place)
        # A shut UDP socket that was never connected does not wake who reads from it everywhere.
        datagrams.settimeout(0.2)
        self.udp_port = datagrams.getsockname()[1]
        self._run(self._answer_datagrams, datagrams, name="links-mtu")

    def _wake_datagrams(self) -> None:
        with (
            suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET, socket.SOCK_DGRAM) as poke,
        ):
            poke.sendto(b"", (self._address, self.udp_port))

    def _run(self, target: Callable[[socket.socket], None], argument: socket.socket, *, name: str) -> None:
        thread = threading.Thread(target=target, args=(argument,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _admit(self, connection: socket.socket, _address: str, _handshake: ResponderHandshake) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), name="link", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._open.discard(connection)
            raise

    def _serve(self, connection: socket.socket) -> None:
        placed = self._free.acquire(timeout=_IDLE_S)
        try:
            if placed and not self._closing.is_set():
                self._answer(Line(connection))
        except LineError as error:
            logger.debug("a connection ended: %s", error)
        except Exception:
            # The edge of the thread: nothing that comes over the network may end a preflight.
            logger.exception("a connection is closed")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            if placed:
                self._free.release()

    def _answer(self, line: Line) -> None:
        kind, seconds, most_bytes = REQUEST.unpack(line.receive(REQUEST.size, limit_s=_IDLE_S))
        if kind == ECHO:
            for _ in range(_MOST_PINGS):
                line.receive(PING.size, limit_s=_IDLE_S)
                came = self._wall()
                line.send(PONG.pack(came, self._wall()), limit_s=_IDLE_S)
            return
        if kind not in (SINK, GIVE) or not 0 < seconds <= self._most_seconds:
            raise LineError(f"asks for {kind!r} for {seconds} s")
        if kind == SINK:
            buffer, waiting = memoryview(bytearray(CHUNK_BYTES)), ProcessorWait()
            meter = drain(line, buffer, clock=time.monotonic, limit_s=seconds + _LATE_S, idle_s=_IDLE_S)
            receipt = RECEIPT.pack(meter.num_bytes, meter.best_bytes_per_s(), waiting.part())
            line.send(receipt, limit_s=_IDLE_S)
        else:
            send_for(line, seconds=seconds, most_bytes=most_bytes, trailed=True)

    def _answer_datagrams(self, datagrams: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                data, sender = datagrams.recvfrom(_LARGEST_DATAGRAM)
                answer = None if self._secret is None else answer_frame(self._secret, data)
                if answer is not None:
                    datagrams.sendto(answer, sender)
            except TimeoutError:
                continue
            except OSError as error:
                # A sender that is gone already makes the kernel complain here.
                logger.debug("a datagram is lost: %s", error)
                self._closing.wait(0.001)


def send_for(line: Line, *, seconds: float, most_bytes: int = 0, trailed: bool = False) -> float:
    """Send zeros for so long, or so many bytes, and end, if `trailed` with a `TRAILER`.

    Returns the part of the time without a processor.

    Raises: LineError, also if there is no more room for `_STALL_S`.
    """
    chunk = memoryview(bytes(CHUNK_BYTES))
    sent, deadline, waiting = 0, time.monotonic() + seconds, ProcessorWait()
    while (left_s := deadline - time.monotonic()) > 0 and (not most_bytes or sent < most_bytes):
        piece = chunk[: most_bytes - sent] if most_bytes else chunk
        try:
            sent += line.send_some(piece, limit_s=min(left_s, _STALL_S))
        except LineError:
            if time.monotonic() < deadline:
                raise
    part = waiting.part()
    if trailed:
        line.send(TRAILER.pack(part), limit_s=_IDLE_S)
    line.end_sending()
    return part
