"""The watch at work: the first host of a generation hears all others, and each of them hears the first."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from elastictrain.launch.membership.records import Generation, Member
from elastictrain.launch.watch.silence import Heard, hear, listen_to, look
from elastictrain.launch.watch.words import Word, seal, unseal

_BEATS_WITHIN_LOST = 8
_DATAGRAM_BYTES = 2048


class Watch:
    """Speaks and listens on a UDP port of its own, from its own thread."""

    def __init__(self, host: str, *, token: bytes, lost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._token = token
        self._lost_s = lost_s
        self._clock = clock
        self._lock = threading.Lock()
        self._word = Word(host, 0, ended=False)
        self._targets: tuple[tuple[str, int], ...] = ()
        self._heard: Heard = listen_to((), now_s=clock())
        self._silent: frozenset[str] = frozenset()
        self._news = False
        self._closed = False
        self._socket = _bound_socket()
        self._socket.settimeout(lost_s / _BEATS_WITHIN_LOST)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to speak and to listen."""
        self._thread.start()

    def close(self) -> None:
        """Fall silent."""
        self._closed = True
        self._thread.join(timeout=1.0)
        self._socket.close()

    def follow(self, generation: Generation | None) -> None:
        """Watch the members of this generation from now on, or nobody."""
        others = _others(generation.members, self._host) if generation is not None else ()
        with self._lock:
            self._targets = tuple(target for member in others if (target := self._target(member)) is not None)
            self._heard = listen_to([member.host for member in others], now_s=self._clock())
            self._silent = frozenset()
            if generation is not None:
                self._word = Word(self._host, generation.number, ended=False)

    def say_ended(self) -> None:
        """Tell the others that this generation has ended, and that storage says why."""
        with self._lock:
            self._word = Word(self._host, self._word.generation, ended=True)
            targets, data = self._targets, seal(self._word, token=self._token)
        self._send(data, targets)

    @property
    def silent(self) -> frozenset[str]:
        """Who has not been heard for too long."""
        with self._lock:
            return self._silent

    def take_news(self) -> bool:
        """Whether anybody has said, since the last call, that this generation has ended or a newer one is there."""
        with self._lock:
            news, self._news = self._news, False
            return news

    def _target(self, member: Member) -> tuple[str, int] | None:
        """Where a member hears this host; None if that is no place: a name would have to be looked up, which may take long."""
        try:
            address = ipaddress.ip_address(member.address)
        except ValueError:
            return None
        if not 0 < member.watch_port < 1 << 16:
            return None
        mapped = self._socket.family == socket.AF_INET6 and address.version == 4
        return (f"::ffff:{address}" if mapped else str(address), member.watch_port)

    def _run(self) -> None:
        spoke_s = float("-inf")
        interval_s = self._lost_s / _BEATS_WITHIN_LOST
        while not self._closed:
            if self._clock() - spoke_s >= interval_s:
                spoke_s = self._clock()
                with self._lock:
                    targets, data = self._targets, seal(self._word, token=self._token)
                self._send(data, targets)
            word = self._receive()
            now_s = self._clock()
            with self._lock:
                if word is not None:
                    self._heard = hear(self._heard, [word.host], now_s=now_s)
                    own = self._word
                    self._news |= word.generation > own.generation or (
                        word.ended and not own.ended and word.generation == own.generation
                    )
                self._heard, self._silent = look(self._heard, now_s=now_s, lost_s=self._lost_s)

    def _receive(self) -> Word | None:
        try:
            data = self._socket.recv(_DATAGRAM_BYTES)
        except OSError:
            # Nothing came in time, or an earlier datagram of ours found no listener.
            return None
        return unseal(data, token=self._token)

    def _send(self, data: bytes, targets: Sequence[tuple[str, int]]) -> None:
        for target in targets:
            try:
                self._socket.sendto(data, target)
            except OSError:
                # No route, for now: what does not arrive is what the other side goes by.
                continue


def _others(members: Sequence[Member], host: str) -> tuple[Member, ...]:
    if not members or members[0].host == host:
        return tuple(members[1:])
    return (members[0],)


def _bound_socket() -> socket.socket:
    """On every address of this host, where it can be both IPv6 and IPv4."""
    with suppress(OSError):
        found = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(("::", 0))
        except OSError:
            found.close()
            raise
        return found
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    found.bind(("", 0))
    return found
