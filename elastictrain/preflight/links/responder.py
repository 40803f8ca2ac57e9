"""One per host: answers whoever has the preflight's token, on real ports of the address that the plan chose."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from elastictrain.errors import HostUnfitError
from elastictrain.net.channel import Channel, ChannelError
from elastictrain.net.server import BACKLOG, CONNECTIONS, ChannelServer
from elastictrain.preflight.links.streams import (
    ECHO,
    GIVE,
    HANDSHAKE,
    PING,
    PONG,
    RECEIPT,
    REQUEST,
    SINK,
    ProcessorWait,
    ResponderKey,
    drain,
    send_for,
)

logger = logging.getLogger(__name__)

_LARGEST_DATAGRAM = 1 << 16
_IDLE_S = 2.0
_MOST_PINGS = 1000


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
        self._connections = connections
        self._most_seconds = most_seconds
        self._wall = wall
        self._key: ResponderKey | None = None
        self._server: ChannelServer | None = None
        self._closing = threading.Event()
        self._datagrams: threading.Thread | None = None

    def start(self) -> None:
        """Raises: HostUnfitError naming address and port."""
        listeners: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        datagrams = socket.socket(family, socket.SOCK_DGRAM)
        try:
            for port in self._wanted:
                listeners.append(socket.create_server((self._address, port), family=family, backlog=BACKLOG))
            datagrams.bind((self._address, 0))
        except OSError as error:
            for one in (*listeners, datagrams):
                one.close()
            raise HostUnfitError(
                f"link checks must listen on {self._address}, ports {list(self._wanted)} (0: any), but cannot: "
                f"{error.strerror or error}; choose an address of this host and ports that are free"
            ) from error
        # A shut UDP socket that was never connected does not wake who reads from it everywhere.
        datagrams.settimeout(0.05)
        self.tcp_ports = tuple(listener.getsockname()[1] for listener in listeners)
        self.udp_port = datagrams.getsockname()[1]
        self._server = ChannelServer(
            listeners, handshake=HANDSHAKE, serve=self._serve, connections=self._connections, place_s=_IDLE_S, name="links"
        )
        self._server.start()
        self._datagrams = threading.Thread(target=self._answer_datagrams, args=(datagrams,), name="links-mtu", daemon=True)
        self._datagrams.start()

    def set_token(self, token: bytes) -> None:
        """Once started: from now on those who have it are answered."""
        self._key = ResponderKey(token, self.nonce)
        if self._server is not None:
            self._server.set_secret(self._key.secret)

    def close(self, timeout_s: float = 2.0) -> None:
        """End everything at once: nobody is waited for, but for our own threads."""
        self._closing.set()
        if self._server is not None:
            self._server.close(timeout_s)
        if self._datagrams is not None:
            self._datagrams.join(timeout_s)

    def _serve(self, channel: Channel) -> None:
        kind, seconds, most_bytes = REQUEST.unpack(channel.receive(REQUEST.size, limit_s=_IDLE_S))
        if kind == ECHO:
            for _ in range(_MOST_PINGS):
                channel.receive(PING.size, limit_s=_IDLE_S)
                came = self._wall()
                channel.send(PONG.pack(came, self._wall()), limit_s=_IDLE_S)
            return
        if kind not in (SINK, GIVE) or not 0 < seconds <= self._most_seconds:
            raise ChannelError(f"it asks for {kind!r} for {seconds} s")
        if kind == SINK:
            waiting = ProcessorWait()
            meter = drain(channel, seconds=seconds, idle_s=_IDLE_S)
            channel.send(RECEIPT.pack(meter.num_bytes, meter.best_bytes_per_s(), waiting.part()), limit_s=_IDLE_S)
        else:
            send_for(channel, seconds=seconds, most_bytes=most_bytes, trailed=True)

    def _answer_datagrams(self, datagrams: socket.socket) -> None:
        with datagrams:
            while not self._closing.is_set():
                try:
                    data, sender = datagrams.recvfrom(_LARGEST_DATAGRAM)
                    answer = None if self._key is None else self._key.answer(data)
                    if answer is not None:
                        datagrams.sendto(answer, sender)
                except TimeoutError:
                    continue
                except OSError as error:
                    # A sender that is gone already makes the kernel complain here.
                    logger.debug("a datagram is lost: %s", error)
                    self._closing.wait(0.001)
