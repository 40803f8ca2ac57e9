"""Heartbeats between launchers: every host speaks to all that it knows to live, and hears who of them gets through to it."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elastictrain.launch.heartbeat.datagram import HeartbeatDatagram, ReplayGuard, seal, shortened, unseal
from elastictrain.launch.membership.records import Generation, GenerationMember, HostRecord


@dataclass(frozen=True, slots=True)
class Heard:
    """Who is listened to, and when each was heard last. All times on this host's monotonic clock."""

    since_s: float
    """From when on silence counts."""

    looked_s: float
    """When this was looked at last."""

    hosts: frozenset[str] = frozenset()
    last_s: Mapping[str, float] = field(default_factory=dict)


def listen_to(hosts: Collection[str], *, now_s: float) -> Heard:
    """Begin anew with these hosts."""
    return Heard(now_s, now_s, frozenset(hosts))


def hear(heard: Heard, hosts: Iterable[str], *, now_s: float) -> Heard:
    """Words of `hosts` have come by now."""
    return replace(heard, last_s={**heard.last_s, **{host: now_s for host in hosts if host in heard.hosts}})


def audible(last_s: Mapping[str, float], *, now_s: float, within_s: float) -> frozenset[str]:
    """Hosts of which something came within that time."""
    return frozenset(host for host, heard_s in last_s.items() if now_s - heard_s <= within_s)


def look(heard: Heard, *, now_s: float, lost_s: float) -> tuple[Heard, frozenset[str]]:
    """Who has been silent for longer than `lost_s`.

    A process that was frozen itself has heard nobody meanwhile, which says nothing about them: after a pause of its own all
    have their time again.
    """
    if now_s - heard.looked_s > lost_s / 2:
        heard = Heard(now_s, now_s, heard.hosts)
    silent = frozenset(
        host for host in heard.hosts if now_s - max(heard.since_s, heard.last_s.get(host, heard.since_s)) > lost_s
    )
    return replace(heard, looked_s=now_s), silent


_BEATS_WITHIN_LOST = 8
_WINDOWS_WITHIN_LOST = 2
"""A host is heard if anything came from it within this part of the time after which it counts as lost: several beats."""

_DATAGRAM_BYTES = 2048
_SCOPED_LENGTH = 4

_Target = tuple[str, int] | tuple[str, int, int, int]
"""A place that a socket sends to."""


class HeartbeatMesh:
    """Speaks and listens on a UDP port of its own, from its own thread."""

    def __init__(self, host: str, *, token: bytes, lost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.host = host
        self._token = token
        self._lost_s = lost_s
        self._clock = clock
        self._lock = threading.Lock()
        self._said = (0, False)
        """The generation, and whether it has ended here."""

        self._line: HostRecord | None = None
        """What this host says of itself while that generation has ended here, and before the next one begins."""

        self._lines: dict[str, HostRecord] = {}
        """What others said of themselves, until it is taken."""

        self._num_sent = 0
        self._guard = ReplayGuard(host)
        self._members: Mapping[str, _Target] = {}
        """Of the generation that is followed."""

        self._called: Mapping[str, _Target] = {}
        """Other hosts that live."""

        self._sources: dict[str, _Target] = {}
        """Where hosts speak from that were heard a moment ago: they may know of this one before it knows of them."""

        self._heard: Heard = listen_to((), now_s=clock())
        self._last_s: dict[str, float] = {}
        self._audible: frozenset[str] = frozenset()
        self._audible_since_s = clock()
        self._silent: frozenset[str] = frozenset()
        self._news = 0
        self._newest_word = (0, False)
        self._newest_word_s = clock()
        self._closed = False
        self._socket = _bound_socket()
        self._socket.settimeout(lost_s / _BEATS_WITHIN_LOST)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

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
        others = [member for member in generation.members if member.host != self.host] if generation is not None else []
        with self._lock:
            self._members = self._targets_of(others)
            self._heard = listen_to([member.host for member in others], now_s=self._clock())
            self._silent = frozenset()
            self._line = None
            if generation is not None:
                self._said = (generation.number, False)
            targets = self._targets()
        # They need not wait for the next beat to learn that it is there.
        self._speak(targets)

    def send_to(self, hosts: Collection[HostRecord]) -> None:
        """Speak to these hosts, too, until this is called again: those that live, as far as is known."""
        called = self._targets_of(hosts)
        with self._lock:
            before, self._called = self._called, called
        # They need not wait for the next beat to learn who hears them.
        known = before.values()
        self._speak({target: host for host, target in called.items() if target not in known})

    def send_end(self, line: HostRecord) -> None:
        """Tell the others that this generation has ended, and what this host says of it, before storage shows it."""
        with self._lock:
            self._said, self._line = (self._said[0], True), shortened(line)
            targets = self._targets()
        self._speak(targets)

    @property
    def silent(self) -> frozenset[str]:
        """Members of the generation that have not been heard for too long."""
        with self._lock:
            return self._silent

    @property
    def heard(self) -> tuple[frozenset[str], float]:
        """Which hosts are heard now, members or not, and since when it is these."""
        with self._lock:
            return self._audible, self._audible_since_s

    def pop_news(self) -> int:
        """The generation of which others have said since the last call that it has ended, or that it is newer; 0 if none."""
        with self._lock:
            news, self._news = self._news, 0
            return news

    def pop_records(self) -> list[HostRecord]:
        """What other hosts have said of themselves since the last call."""
        with self._lock:
            lines, self._lines = self._lines, {}
            return list(lines.values())

    @property
    def num_dropped(self) -> int:
        """How many words of this run were not heard: they came once more, too late, or were meant for another launcher."""
        with self._lock:
            return self._guard.num_dropped

    def _targets(self) -> dict[_Target, str]:
        """Who is spoken to, by place."""
        return {target: host for known in (self._sources, self._called, self._members) for host, target in known.items()}

    def _targets_of(self, hosts: Collection[GenerationMember | HostRecord]) -> dict[str, _Target]:
        found = {host.host: self._target(host.address, host.watch_port) for host in hosts if host.host != self.host}
        return {host: target for host, target in found.items() if target is not None}

    def _target(self, name: str, port: int) -> _Target | None:
        """Where a host hears this one; None if that is no place: a name would have to be looked up, which may take long."""
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return None
        if not 0 < port < 1 << 16:
            return None
        mapped = self._socket.family == socket.AF_INET6 and address.version == 4
        return (f"::ffff:{address}" if mapped else str(address), port)

    def _run(self) -> None:
        spoke_s = looked_s = float("-inf")
        interval_s = self._lost_s / _BEATS_WITHIN_LOST
        while not self._closed:
            if self._clock() - spoke_s >= interval_s:
                spoke_s = self._clock()
                with self._lock:
                    targets = self._targets()
                self._speak(targets)
            datagram, source = self._receive()
            is_new = datagram is not None and source is not None and self._note(datagram, source)
            if is_new or self._clock() - looked_s >= interval_s / 2:
                looked_s = self._clock()
                self._look()
            if is_new and datagram is not None and source is not None:
                self._speak({source: datagram.host})

    def _note(self, datagram: HeartbeatDatagram, source: _Target) -> bool:
        """Remember what was heard; whether its host was not heard before, and is to know soon that it is heard."""
        now_s = self._clock()
        with self._lock:
            if datagram.host == self.host or not self._guard.passes(datagram):
                return False
            self._heard = hear(self._heard, [datagram.host], now_s=now_s)
            self._last_s[datagram.host], self._sources[datagram.host] = now_s, source
            told = (datagram.generation, datagram.ended)
            if told > self._newest_word:
                self._newest_word, self._newest_word_s = told, now_s
            # It may be said before storage shows it, so more than once; but hosts of a group without this one say it for ever.
            fresh = now_s - self._newest_word_s <= self._lost_s
            if fresh and told > self._said:
                self._news = max(self._news, datagram.generation)
            if datagram.line is not None:
                self._lines[datagram.host] = datagram.line
            return datagram.host not in self._audible

    def _look(self) -> None:
        with self._lock:
            now_s = self._clock()
            self._heard, self._silent = look(self._heard, now_s=now_s, lost_s=self._lost_s)
            heard = audible(self._last_s, now_s=now_s, within_s=self._lost_s / _WINDOWS_WITHIN_LOST)
            if heard != self._audible:
                self._audible, self._audible_since_s = heard, now_s
                self._last_s = {host: last_s for host, last_s in self._last_s.items() if host in heard}
                self._sources = {host: source for host, source in self._sources.items() if host in heard}

    def _receive(self) -> tuple[HeartbeatDatagram | None, _Target | None]:
        try:
            data, source = self._socket.recvfrom(_DATAGRAM_BYTES)
        except OSError:
            # Nothing came in time, or an earlier datagram of ours found no listener.
            return None, None
        # An address without a scope is the same place as the one in a record.
        plain = len(source) == _SCOPED_LENGTH and not source[3]
        return unseal(data, token=self._token), source[:2] if plain else source

    def _speak(self, targets: Mapping[_Target, str]) -> None:
        with self._lock:
            generation, ended = self._said
            # Each by itself: a path that swallows large datagrams must not silence this host.
            lines = (None,) if self._line is None else (None, self._line)
            first, self._num_sent = self._num_sent + 1, self._num_sent + len(targets) * len(lines)
        datagrams = ((target, host, line) for line in lines for target, host in targets.items())
        for counter, (target, host, line) in enumerate(datagrams, start=first):
            data = seal(HeartbeatDatagram(self.host, host, counter, generation, ended, line), token=self._token)
            try:
                self._socket.sendto(data, target)
            except OSError:
                # No route, for now: what does not arrive is what the other side goes by.
                continue


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
