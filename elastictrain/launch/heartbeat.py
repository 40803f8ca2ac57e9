"""Heartbeats between launchers: every host sends datagrams to all that it knows to live, and knows whose get through to it.

Datagrams are signed with the run's token.
"""

import hmac
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastictrain.bounded_json import MalformedJsonError, as_record, encode_record, parse_json
from elastictrain.launch.membership.records import Generation, GenerationMember, HostRecord, known_record
from elastictrain.net.channel import SIGNATURE_BYTES, signature

_LARGEST_BYTES = 512  # fits into the smallest frame that any network has: a path that swallows large ones must not silence this

_LARGEST_WITH_RECORD_BYTES = 1232
"""What every path of IPv6 lets through whole. Whoever it does not reach reads the record in storage."""

_REASONS = (300, 100, 0)  # characters of a reason that are sent: as many as fit
_HEADER_BYTES = 300
_DATAGRAM_BYTES = 2048
_SCOPED_LENGTH = 4
_MOST_SENDERS = 4096
_BEATS_WITHIN_LOST = 8
_WINDOWS_WITHIN_LOST = 2
"""A host is heard if anything came from it within this part of the time after which it counts as lost: several beats."""

_Target = tuple[str, int] | tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class HeartbeatDatagram:
    """A sign of life."""

    host: str
    to: str  # The launcher that it is meant for. Every start of a launcher has a name of its own.
    counter: int  # larger than in all that this launcher has sent before
    generation: int  # the newest one that this host knows
    ended: bool  # whether it has ended in the eyes of this host: its record then tells why
    record: HostRecord | None = None  # what the host says of itself, without whom it hears


def seal(datagram: HeartbeatDatagram, *, token: bytes) -> bytes:
    """One datagram."""
    fields = [datagram.host, datagram.to, datagram.counter, datagram.generation, datagram.ended]
    body = encode_record(fields if datagram.record is None else [*fields, datagram.record])
    return signature(body, token) + body


def shortened(record: HostRecord) -> HostRecord | None:
    """A record as it is sent: without whom the host hears, and with the begin of a long reason. None if that is too long."""
    for most in _REASONS:
        end = record.end and replace(record.end, reason=record.end.reason[:most])
        short = replace(record, hears=(), writers=(), reason=record.reason[:most], end=end)
        if len(encode_record(short)) <= _LARGEST_WITH_RECORD_BYTES - _HEADER_BYTES:
            return short
    return None


def unseal(data: bytes, *, token: bytes) -> HeartbeatDatagram | None:
    """The sign of life in a datagram; None if it is of another run, or none at all."""
    body = data[SIGNATURE_BYTES:]
    if len(data) > _LARGEST_WITH_RECORD_BYTES or not hmac.compare_digest(data[:SIGNATURE_BYTES], signature(body, token)):
        return None
    try:
        fields = as_record(parse_json(body), list[Any])
        host, to, counter, generation, ended = as_record(fields[:5], tuple[str, str, int, int, bool])
        record = known_record(HostRecord, fields[5]) if len(fields) > 5 else None
    except MalformedJsonError:
        return None
    if record is None and (len(fields) > 5 or len(data) > _LARGEST_BYTES):
        return None
    if len(fields) > 6 or (record is not None and record.host != host):
        return None
    return HeartbeatDatagram(host, to, counter, generation, ended, record)


def is_new(datagram: HeartbeatDatagram, last: dict[str, int], *, own: str) -> bool:
    """Whether it is meant for the launcher `own`, and newer than all that came from its sender, of which `last` takes note.

    So each datagram counts once, and in the order in which its sender sent them. Nothing is kept between starts: both launchers
    have other names then, and no earlier datagram is meant for this one.
    """
    if datagram.to != own or datagram.counter <= last.get(datagram.host, 0):
        return False
    # Those that are heard stay: who has the token could fill the memory of this host otherwise.
    last.pop(datagram.host, None)
    last[datagram.host] = datagram.counter
    if len(last) > _MOST_SENDERS:
        del last[next(iter(last))]
    return True


@dataclass(slots=True)
class SilenceCheck:
    """Which of some hosts have been silent for too long. All times on this host's monotonic clock."""

    hosts: frozenset[str]
    since_s: float  # from when on silence counts
    looked_s: float

    def find_silent(self, last_s: Mapping[str, float], *, now_s: float, lost_s: float) -> frozenset[str]:
        """Those of which nothing came for longer than `lost_s`; `last_s` tells when something came last.

        A process that was frozen itself has received nothing meanwhile, which says nothing about the others: after a pause of
        its own all have their time again.
        """
        if now_s - self.looked_s > lost_s / 2:
            self.since_s = now_s
        self.looked_s = now_s
        return frozenset(host for host in self.hosts if now_s - max(self.since_s, last_s.get(host, self.since_s)) > lost_s)


class HeartbeatMesh:
    """Sends and receives on a UDP port of its own, from its own thread."""

    def __init__(self, host: str, *, token: bytes, lost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.host = host
        self._token = token
        self._lost_s = lost_s
        self._clock = clock
        self._lock = threading.Lock()
        """For what follows."""

        self._sent = (0, False)
        """The generation, and whether it has ended here."""

        self._record: HostRecord | None = None
        """What this host says of itself while that generation has ended here, and before the next one begins."""

        self._records: dict[str, HostRecord] = {}
        self._num_sent = 0
        self._last_counters: dict[str, int] = {}
        self._members: Mapping[str, _Target] = {}
        self._others: Mapping[str, _Target] = {}
        self._sources: dict[str, _Target] = {}
        """Of hosts that are heard: they may know of this one before it knows of them."""

        self._last_s: dict[str, float] = {}
        self._check = SilenceCheck(frozenset(), clock(), clock())
        self._news = 0
        self.silent: frozenset[str] = frozenset()
        """Members of the generation that have not been heard for too long."""

        self.heard: tuple[frozenset[str], float] = (frozenset(), clock())
        """Which hosts are heard now, members or not, and since when it is these."""

        self._newest = (0, False)
        self._newest_s = clock()
        self._closed = False
        self._socket = _bound_socket()
        self._socket.settimeout(lost_s / _BEATS_WITHIN_LOST)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to send and to receive."""
        self._thread.start()

    def close(self) -> None:
        """Fall silent."""
        self._closed = True
        # Who receives is woken by a datagram that says nothing.
        own = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
        with suppress(OSError):
            self._socket.sendto(b"", (own, self.port))
        self._thread.join(timeout=1.0)
        self._socket.close()

    def follow(self, generation: Generation) -> None:
        """Watch the members of this generation from now on."""
        others = [member for member in generation.members if member.host != self.host]
        with self._lock:
            self._members = self._targets_of(others)
            self._check = SilenceCheck(frozenset(member.host for member in others), self._clock(), self._clock())
            self.silent = frozenset()
            self._sent, self._record = (generation.number, False), None
        # They need not wait for the next beat to learn that it is there.
        self._send(self._targets())

    def send_to(self, hosts: Collection[HostRecord]) -> None:
        """Send to these hosts, too, until this is called again: those that live, as far as is known."""
        others = self._targets_of(hosts)
        with self._lock:
            before, self._others = self._others, others
        # They need not wait for the next beat to learn who hears them.
        known = before.values()
        self._send({target: host for host, target in others.items() if target not in known})

    def send_end(self, record: HostRecord) -> None:
        """Tell the others that this generation has ended, and what this host says of it, before storage shows it."""
        with self._lock:
            self._sent, self._record = (self._sent[0], True), shortened(record)
        self._send(self._targets())

    def pop_received(self) -> tuple[int, list[HostRecord]]:
        """What other hosts have said since the last call: a generation that has ended or is newer, or 0; and their records."""
        with self._lock:
            news, records = self._news, [*self._records.values()]
            self._news, self._records = 0, {}
            return news, records

    def _targets(self) -> dict[_Target, str]:
        with self._lock:
            return {target: host for known in (self._sources, self._others, self._members) for host, target in known.items()}

    def _targets_of(self, hosts: Collection[GenerationMember | HostRecord]) -> dict[str, _Target]:
        found = {host.host: self._target(host.address, host.watch_port) for host in hosts if host.host != self.host}
        return {host: target for host, target in found.items() if target is not None}

    def _target(self, name: str, port: int) -> _Target | None:
        """Where a host receives; None if that is no place: a name would have to be looked up, which may take long."""
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return None
        if not 0 < port < 1 << 16:
            return None
        mapped = self._socket.family == socket.AF_INET6 and address.version == 4
        return (f"::ffff:{address}" if mapped else str(address), port)

    def _run(self) -> None:
        sent_s = looked_s = float("-inf")
        interval_s = self._lost_s / _BEATS_WITHIN_LOST
        while not self._closed:
            if self._clock() - sent_s >= interval_s:
                sent_s = self._clock()
                self._send(self._targets())
            newcomer = self._receive()
            if newcomer or self._clock() - looked_s >= interval_s / 2:
                looked_s = self._clock()
                self._look()
            self._send(newcomer)

    def _receive(self) -> dict[_Target, str]:
        """Take note of a datagram; returns its host if that was not heard before, and is to know soon that it is heard."""
        try:
            data, source = self._socket.recvfrom(_DATAGRAM_BYTES)
        except OSError:
            # Nothing came in time, or an earlier datagram of ours found no listener.
            return {}
        datagram = unseal(data, token=self._token)
        # An address without a scope is the same place as the one in a record.
        is_plain = len(source) == _SCOPED_LENGTH and not source[3]
        target: _Target = source[:2] if is_plain else source
        if datagram is None or not self._note(datagram, target):
            return {}
        return {target: datagram.host}

    def _note(self, datagram: HeartbeatDatagram, source: _Target) -> bool:
        now_s = self._clock()
        with self._lock:
            if datagram.host == self.host or not is_new(datagram, self._last_counters, own=self.host):
                return False
            self._last_s[datagram.host], self._sources[datagram.host] = now_s, source
            told = (datagram.generation, datagram.ended)
            if told > self._newest:
                self._newest, self._newest_s = told, now_s
            # It may be said before storage shows it, so more than once; but hosts of a group without this one say it for ever.
            fresh = now_s - self._newest_s <= self._lost_s
            if fresh and told > self._sent:
                self._news = max(self._news, datagram.generation)
            if datagram.record is not None:
                self._records[datagram.host] = datagram.record
            return datagram.host not in self.heard[0]

    def _look(self) -> None:
        with self._lock:
            now_s, window_s = self._clock(), self._lost_s / _WINDOWS_WITHIN_LOST
            # What is older tells no more than that nothing came since then.
            self._last_s = {host: last_s for host, last_s in self._last_s.items() if now_s - last_s <= self._lost_s}
            self.silent = self._check.find_silent(self._last_s, now_s=now_s, lost_s=self._lost_s)
            heard = frozenset(host for host, last_s in self._last_s.items() if now_s - last_s <= window_s)
            if heard != self.heard[0]:
                self.heard = heard, now_s
                self._sources = {host: source for host, source in self._sources.items() if host in heard}

    def _send(self, targets: Mapping[_Target, str]) -> None:
        with self._lock:
            generation, ended = self._sent
            # Each by itself: a path that swallows large datagrams must not silence this host.
            records = (None,) if self._record is None else (None, self._record)
            first, self._num_sent = self._num_sent + 1, self._num_sent + len(targets) * len(records)
        datagrams = ((target, host, record) for record in records for target, host in targets.items())
        for counter, (target, host, record) in enumerate(datagrams, start=first):
            data = seal(HeartbeatDatagram(self.host, host, counter, generation, ended, record), token=self._token)
            # No route, for now: what does not arrive is what the other side goes by.
            with suppress(OSError):
                self._socket.sendto(data, target)


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
