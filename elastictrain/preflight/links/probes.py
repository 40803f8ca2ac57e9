"""What one host asks another: open ports, frame size, round trip, clock and bandwidth."""

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from elastictrain.config.preflight import PreflightLimits, PreflightThresholds
from elastictrain.net.channel import Channel, ChannelError, connect
from elastictrain.preflight.links import responder
from elastictrain.preflight.links.messages import Contact, Flow, HostIntroduction, Link
from elastictrain.preflight.links.responder import ResponderKey, StreamResult, ask_to_give, ask_to_take

SMALLEST = 576  # Every IPv4 host takes packets of this size. Source: RFC 791.
LARGEST = 65535  # the total length of an IPv4 packet has 16 bits; that of loopback is 65536

WELL_KNOWN = (1280, 1400, 1420, 1440, 1450, 1460, 1472, 1480, 1492, 1500, 2000, 4000, 8000, 8500, 8896, 8950, 9000, 9001)
"""MTUs of tunnels, PPPoE, Ethernet and clouds. One byte more than each is tried as well, so that one round finds it."""

# Linux. Python's socket module has no names for them before 3.14.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_FORBID_FRAGMENTS = {
    socket.AF_INET: (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE),
    socket.AF_INET6: (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE),
}
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
_TRIES = 3
_NUM_BETWEEN = 6
_MOST_SEARCHES = 5


def candidates(passing: int, lost: int) -> tuple[int, ...]:
    """Sizes to try next: `passing` bytes pass and `lost` bytes do not. Empty if nothing is between them."""
    known = {size for mtu in WELL_KNOWN for size in (mtu, mtu + 1)}
    step = max(1, (lost - passing) // (_NUM_BETWEEN + 1))
    spread = range(passing + step, lost, step)
    return tuple(sorted(size for size in known | set(spread) if passing < size < lost))


def find_largest_packet(place: tuple[str, int], *, source: str, key: ResponderKey, intended: int, wait_s: float) -> int:
    """Bytes of the largest packet to `place` that arrives, IP and UDP headers included, at most `intended`; 0 if none is
    acknowledged. Takes one round trip on a healthy link, else at most four times `wait_s`. Raises: OSError."""
    top = max(SMALLEST, min(intended, LARGEST))
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.setsockopt(*_FORBID_FRAGMENTS[family])
        datagrams.bind((source, 0))
        datagrams.connect(place)
        passing = max(_acknowledged(datagrams, key, [SMALLEST, top], wait_s=wait_s), default=0)
        lost = top if passing else 0
        for _ in range(_MOST_SEARCHES):
            if not (sizes := candidates(passing, lost)):
                break
            passing = max([passing, *_acknowledged(datagrams, key, sizes, wait_s=wait_s / 2)])
            lost = min([lost, *(size for size in sizes if size > passing)])
        return passing


def _acknowledged(datagrams: socket.socket, key: ResponderKey, sizes: Sequence[int], *, wait_s: float) -> set[int]:
    """The sizes that arrived. Each is sent a few times, as any packet may be lost; the largest one ends the wait."""
    passed: set[int] = set()
    began = time.monotonic()
    for attempt in range(_TRIES):
        for size in sizes:
            if size not in passed:
                # Larger than the interface takes, or an earlier datagram was refused: this size counts as lost.
                with suppress(OSError):
                    datagrams.send(key.probe(size, size=max(size - _HEADERS[datagrams.family], responder.FRAME_BYTES)))
        until = began + wait_s * (attempt + 1) / _TRIES
        while sizes[-1] not in passed and (left_s := until - time.monotonic()) > 0:
            try:
                datagrams.settimeout(left_s)
                number = key.acknowledged(datagrams.recv(responder.FRAME_BYTES))
            except TimeoutError:
                break
            except OSError:
                # An earlier datagram was refused.
                time.sleep(0.001)
                continue
            if number is not None and number in sizes:
                passed.add(number)
        if sizes[-1] in passed:
            break
    return passed


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Thresholds and deadlines of the link checks, in seconds. The defaults fit hosts of one data centre."""

    thresholds: PreflightThresholds = field(default_factory=PreflightThresholds)
    limits: PreflightLimits = field(default_factory=PreflightLimits)
    roster_s: float = 60.0  # the first host waits this long for the others to introduce themselves
    grace_s: float = 1.0  # a host counts as silent if its report is later than its own limit by this
    take_s: float = 2.0  # an idle host takes up an order within this time
    connect_s: float = 1.0  # TCP connection; a lost first packet (resent after 1 s) is not waited for: failures are tried again
    answer_s: float = 1.0  # one answer of a connected host
    mtu_wait_s: float = 0.45  # a large frame not acknowledged by then is lost; healthy links answer in a millisecond

    def limit_s(self, *, measure: bool) -> float:
        """When all must have carried out an order. Each stream of a pair takes a connection, a handshake and a receipt."""
        return 3 * (self.connect_s + 2 * self.answer_s + self.limits.stream_s) if measure else self.limits.contact_s


_NUM_PINGS = 9
_DEFAULT_MTU = 1500  # of Ethernet, where neither interface is known


@dataclass(slots=True)
class PeerProbe:
    """Probes `target` from `source`; `link` is their places. For one thread at a time. Call `contact` before `flows`."""

    source: HostIntroduction
    target: HostIntroduction
    link: Link
    token: bytes
    options: LinkOptions
    wall: Callable[[], float] = time.time
    _port: int = 0  # for streams: the first port that `contact` found open

    def contact(self) -> Contact:
        """Reach, latency, clock and MTU of the way there. Never raises for network failures."""
        ports = self.target.tcp_ports
        # All at once: each silently blocked port takes the whole limit.
        with ThreadPoolExecutor(len(ports), thread_name_prefix="link-port") as threads:
            found = dict(zip(ports, threads.map(self._try_port, ports), strict=True))
        timed = {port: result for port, result in found.items() if not isinstance(result, str)}
        self._port = next(iter(timed), ports[0])
        latency_s, offset_s = min(timed.values(), default=(None, None))
        known = [mtu for mtu in (self.source.mtu, self.target.mtu) if mtu is not None]
        intended = min([*known, LARGEST]) if known else _DEFAULT_MTU
        largest = None
        if timed:
            place, wait_s = (self.target.address, self.target.udp_port), self.options.mtu_wait_s
            try:
                largest = find_largest_packet(
                    place, source=self.source.address, key=self._key, intended=intended, wait_s=wait_s
                )
            except OSError:
                largest = 0
        return Contact(
            link=self.link,
            blocked=tuple(sorted((port, result) for port, result in found.items() if isinstance(result, str))),
            largest=largest,
            intended=intended,
            latency_s=latency_s,
            offset_s=offset_s,
        )

    def flows(self) -> tuple[Flow, ...]:
        """Bandwidth there, back, and both at once; 0 if nothing arrives."""
        there, back = self._flow(ask_to_take, both=False), self._flow(ask_to_give, both=False)
        if not there.gbps and not back.gbps:
            # The next two would only take as long and fail.
            return there, back
        with ThreadPoolExecutor(2, thread_name_prefix="link-flow") as threads:
            return there, back, *threads.map(partial(self._flow, both=True), (ask_to_take, ask_to_give))

    def _try_port(self, port: int) -> tuple[float, float] | str:
        """Round trip and clock offset, or why the port cannot be used."""
        try:
            with self._connected(port) as channel:
                return self._time(channel)
        except ChannelError as error:
            return str(error)

    def _time(self, channel: Channel) -> tuple[float, float]:
        """Median round trip in seconds, and the other clock minus this one by the fastest round trip."""
        channel.send(responder.REQUEST.pack(responder.ECHO, 0.0, 0), limit_s=self.options.answer_s)
        found = []
        deadline = time.monotonic() + self.options.answer_s
        for _ in range(_NUM_PINGS):
            began, asked = time.perf_counter(), self.wall()
            channel.send(responder.PING.pack(asked), limit_s=self.options.answer_s)
            received, answered = responder.PONG.unpack(channel.receive(responder.PONG.size, limit_s=self.options.answer_s))
            took_s, heard = time.perf_counter() - began, self.wall()
            found.append((took_s, exchange_offset(asked, received, answered, heard)))
            if time.monotonic() > deadline:
                break
        return statistics.median(took_s for took_s, _ in found), min(found)[1]

    def _flow(self, ask: Callable[..., StreamResult], *, both: bool) -> Flow:
        result = StreamResult(0, 0.0, 0.0)
        with suppress(ChannelError), self._connected(self._port) as channel:
            result = ask(channel, seconds=self.options.limits.stream_s, answer_s=self.options.answer_s)
        link = self.link if ask is ask_to_take else self.link[::-1]
        return Flow(link=link, gbps=8e-9 * result.best_bytes_per_s, both=both, waited=round(result.waited, 3))

    @property
    def _key(self) -> ResponderKey:
        return ResponderKey(self.token, bytes.fromhex(self.target.nonce))

    @contextmanager
    def _connected(self, port: int) -> Iterator[Channel]:
        with connect(self.target.address, port, source=self.source.address, limit_s=self.options.connect_s) as channel:
            responder.HANDSHAKE.introduce(channel, self._key.secret, limit_s=self.options.answer_s)
            yield channel


def exchange_offset(asked: float, received: float, answered: float, heard: float) -> float:
    """The other clock minus this one; the second and third time are the other's. Source: RFC 5905, section 8."""
    return ((received - asked) + (answered - heard)) / 2
