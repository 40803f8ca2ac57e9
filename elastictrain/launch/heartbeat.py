"""Heartbeats between launchers: each host sends signed UDP datagrams to all live hosts, and knows whose datagrams arrive."""

import hmac
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastictrain.bounded_json import MalformedJsonError, as_record, encode_record, parse_json
from elastictrain.launch.cluster.place import as_ip
from elastictrain.launch.membership.records import Generation, GenerationMember, HostRecord, known_record
from elastictrain.net.channel import SIGNATURE_BYTES, signature

_LARGEST_BYTES = 512  # fits the smallest MTU of any network: a path that drops large datagrams must not silence this host
_LARGEST_WITH_RECORD_BYTES = 1232  # fits the IPv6 minimum MTU; a host that it does not reach reads the record in storage
_REASONS = (300, 100, 0)  # lengths to which a reason is cut, tried in this order until the record fits
_HEADER_BYTES = 300
_DATAGRAM_BYTES = 2048
_SCOPED_LENGTH = 4
_MOST_SENDERS = 4096
_BEATS_WITHIN_LOST = 8
_WINDOWS_WITHIN_LOST = 2  # a host is heard if a datagram came within this part of `lost_s`: several heartbeats
_Target = tuple[str, int] | tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class HeartbeatDatagram:
    host: str
    to: str  # the launcher that it is meant for; every start of a launcher has a new name
    counter: int  # larger than in all datagrams that this launcher sent before
    generation: int  # the newest one that this host knows
    ended: bool  # whether this host sees it as ended: its record then has the reason
    record: HostRecord | None = None  # the host's record, without the hosts that it hears


def seal(datagram: HeartbeatDatagram, *, token: bytes) -> bytes:
    fields = [datagram.host, datagram.to, datagram.counter, datagram.generation, datagram.ended]
    body = encode_record(fields if datagram.record is None else [*fields, datagram.record])
    return signature(body, token) + body


def shortened(record: HostRecord) -> HostRecord | None:
    """The record as it is sent: no heard hosts, the reason cut where it is long. None if it is still too long."""
    for most in _REASONS:
        end = record.end and replace(record.end, reason=record.end.reason[:most])
        short = replace(record, hears=(), writers=(), reason=record.reason[:most], end=end)
        if len(encode_record(short)) <= _LARGEST_WITH_RECORD_BYTES - _HEADER_BYTES:
            return short
    return None


def unseal(data: bytes, *, token: bytes) -> HeartbeatDatagram | None:
    """Decode a datagram; None if it is of another run or malformed."""
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
    """Whether it is meant for the launcher `own` and newer than all before from its sender. Updates `last`.

    So each datagram counts once, in sending order. No state is kept between starts: both launchers have new names then, and
    no earlier datagram is meant for this one.
    """
    if datagram.to != own or datagram.counter <= last.get(datagram.host, 0):
        return False
    # Keep the most recent senders only: a peer with the token could otherwise fill the memory of this host.
    last.pop(datagram.host, None)
    last[datagram.host] = datagram.counter
    if len(last) > _MOST_SENDERS:
        del last[next(iter(last))]
    return True


@dataclass(slots=True)
class SilenceCheck:
    """Which of some hosts have been silent for too long. Times on this host's monotonic clock."""

    hosts: frozenset[str]
    since_s: float  # from when on silence counts
    looked_s: float

    def find_silent(self, last_s: Mapping[str, float], *, now_s: float, lost_s: float) -> frozenset[str]:
        """Return the hosts without a datagram for longer than `lost_s`; `last_s` has the time of each host's last one.

        A process that was frozen itself received nothing meanwhile, which proves nothing: after a pause of its own, every host
        gets the full time again.
        """
        if now_s - self.looked_s > lost_s / 2:
            self.since_s = now_s
        self.looked_s = now_s
        return frozenset(host for host in self.hosts if now_s - max(self.since_s, last_s.get(host, self.since_s)) > lost_s)


class HeartbeatMesh:
    """Sends and receives on its own UDP port, from its own thread."""

    def __init__(self, host: str, *, token: bytes, lost_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.host = host
        self._token = token
        self._lost_s = lost_s
        self._clock = clock
        self._lock = threading.Lock()  # guards all fields below
        self._sent = (0, False)  # the generation, and whether it has ended here
        self._record: HostRecord | None = None  # this host's record, sent from that end until the next generation
        self._records: dict[str, HostRecord] = {}
        self._num_sent = 0
        self._last_counters: dict[str, int] = {}
        self._members: Mapping[str, _Target] = {}
        self._others: Mapping[str, _Target] = {}
        self._sources: dict[str, _Target] = {}  # addresses of heard hosts: they may know this host before it knows them
        self._last_s: dict[str, float] = {}
        self._check = SilenceCheck(frozenset(), clock(), clock())
        self._news = 0
        self.silent: frozenset[str] = frozenset()  # members of the generation that have been silent for too long
        self.heard: tuple[frozenset[str], float] = (frozenset(), clock())  # the hosts heard now, and since when
        self._newest = (0, False)
        self._newest_s = clock()
        self._closed = False
        self._socket = _bound_socket()
        self._socket.settimeout(lost_s / _BEATS_WITHIN_LOST)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        # An empty datagram wakes the receiving thread.
        own = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
        with suppress(OSError):
            self._socket.sendto(b"", (own, self.port))
        self._thread.join(timeout=1.0)
        self._socket.close()

    def follow(self, generation: Generation) -> None:
        """Watch the other members of `generation`, which begins here, and send to them; `silent` is empty again."""
        others = [member for member in generation.members if member.host != self.host]
        with self._lock:
            self._members = self._targets_of(others)
            self._check = SilenceCheck(frozenset(member.host for member in others), self._clock(), self._clock())
            self.silent = frozenset()
            self._sent, self._record = (generation.number, False), None
        # Send at once: the members learn of the generation without waiting for the next heartbeat.
        self._send(self._targets())

    def send_to(self, hosts: Collection[HostRecord]) -> None:
        """Also send to these hosts, until the next call."""
        others = self._targets_of(hosts)
        with self._lock:
            before, self._others = self._others, others
        # Send to new hosts at once: they learn that they are heard without waiting for the next heartbeat.
        known = before.values()
        self._send({target: host for host, target in others.items() if target not in known})

    def send_end(self, record: HostRecord) -> None:
        """Send the end of this generation and this host's record to the others, before storage shows them."""
        with self._lock:
            self._sent, self._record = (self._sent[0], True), shortened(record)
        self._send(self._targets())

    def pop_received(self) -> tuple[int, list[HostRecord]]:
        """Return what arrived since the last call: an ended or newer generation, or 0; and the records of other hosts."""
        with self._lock:
            news, records = self._news, [*self._records.values()]
            self._news, self._records = 0, {}
            return news, records

    def _targets(self) -> dict[_Target, str]:
        with self._lock:
            return {target: host for known in (self._sources, self._others, self._members) for host, target in known.items()}

    def _targets_of(self, hosts: Collection[GenerationMember | HostRecord]) -> dict[str, _Target]:
        """Where the hosts receive, of those whose address is an IP address: a name look-up may take long."""
        found: dict[str, _Target] = {}
        for one in hosts:
            address = as_ip(one.address)
            if one.host != self.host and address is not None and 0 < one.watch_port < 1 << 16:
                mapped = self._socket.family == socket.AF_INET6 and address.version == 4
                found[one.host] = (f"::ffff:{address}" if mapped else str(address), one.watch_port)
        return found

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
        """Process one datagram; returns its sender if that was not heard before and must learn soon that it is."""
        try:
            data, source = self._socket.recvfrom(_DATAGRAM_BYTES)
        except OSError:
            # Timeout, or an earlier datagram of this host found no listener.
            return {}
        datagram, now_s = unseal(data, token=self._token), self._clock()
        # An address without a scope is the same as the one in a record.
        is_plain = len(source) == _SCOPED_LENGTH and not source[3]
        target: _Target = source[:2] if is_plain else source
        with self._lock:
            if datagram is None or datagram.host == self.host or not is_new(datagram, self._last_counters, own=self.host):
                return {}
            self._last_s[datagram.host], self._sources[datagram.host] = now_s, target
            told = (datagram.generation, datagram.ended)
            if told > self._newest:
                self._newest, self._newest_s = told, now_s
            # Storage may not show it yet, so it is reported repeatedly; but groups without this host would report it for ever.
            fresh = now_s - self._newest_s <= self._lost_s
            if fresh and told > self._sent:
                self._news = max(self._news, datagram.generation)
            if datagram.record is not None:
                self._records[datagram.host] = datagram.record
            return {} if datagram.host in self.heard[0] else {target: datagram.host}

    def _look(self) -> None:
        with self._lock:
            now_s, window_s = self._clock(), self._lost_s / _WINDOWS_WITHIN_LOST
            # Older times add nothing.
            self._last_s = {host: last_s for host, last_s in self._last_s.items() if now_s - last_s <= self._lost_s}
            self.silent = self._check.find_silent(self._last_s, now_s=now_s, lost_s=self._lost_s)
            heard = frozenset(host for host, last_s in self._last_s.items() if now_s - last_s <= window_s)
            if heard != self.heard[0]:
                self.heard = heard, now_s
                self._sources = {host: source for host, source in self._sources.items() if host in heard}

    def _send(self, targets: Mapping[_Target, str]) -> None:
        with self._lock:
            generation, ended = self._sent
            # The record goes in a datagram of its own: a path that drops large datagrams must not silence this host.
            records = (None,) if self._record is None else (None, self._record)
            first, self._num_sent = self._num_sent + 1, self._num_sent + len(targets) * len(records)
        datagrams = ((target, host, record) for record in records for target, host in targets.items())
        for counter, (target, host, record) in enumerate(datagrams, start=first):
            data = seal(HeartbeatDatagram(self.host, host, counter, generation, ended, record), token=self._token)
            # No route for now: the receiving side judges by what arrives.
            with suppress(OSError):
                self._socket.sendto(data, target)


def _bound_socket() -> socket.socket:
    """UDP socket on every address of this host, dual-stack where the kernel has IPv6."""
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
