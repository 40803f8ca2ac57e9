"""What one host asks another: open ports, frame size, loss, round trip, clock and bandwidth."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from elastictrain.config.preflight import PreflightLimits, PreflightThresholds
from elastictrain.net.channel import Channel, ChannelError, connect
from elastictrain.preflight.links import responder
from elastictrain.preflight.links.messages import Contact, Flow, HostIntroduction, Link
from elastictrain.preflight.links.responder import StreamResult, ask_to_give, ask_to_take

WELL_KNOWN = (576, 1280, 1400, 1450, 1480, 1500, 4000, 8500, 8896, 8950)  # MTUs of tunnels, Ethernet and clouds
_LARGEST = 65535  # the total length of an IPv4 packet has 16 bits; that of loopback is 65536
_NUM_PINGS = 9
LOSS_SEGMENTS = 10_000  # enough to tell 0.4 % from 0.1 %
_LOSS_BYTES = 32 << 20  # at most, where segments are large
_IN_FLIGHT_BYTES, _BYTES_PER_S = 16 << 10, 125 << 20  # no buffer on the way overflows: what is lost is lost without congestion
_DEFAULT_MTU = 1500  # of Ethernet, where neither interface is known


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Thresholds and deadlines of the link checks, in seconds. The defaults fit hosts of one data centre."""

    thresholds: PreflightThresholds = field(default_factory=PreflightThresholds)
    limits: PreflightLimits = field(default_factory=PreflightLimits)
    roster_s: float = 60.0  # the first host waits this long for the others to introduce themselves
    grace_s: float = 1.0  # a host counts as silent if its report is later than its own limit by this
    take_s: float = 2.0  # an idle host takes up an order within this time
    connect_s: float = 1.0  # TCP connection, at the last of three tries; the first two have less
    answer_s: float = 1.0  # one answer of a connected host
    mtu_wait_s: float = 0.3  # a large frame that did not arrive by then is lost; healthy links answer in a millisecond

    def limit_s(self, *, measure: bool) -> float:
        """When all must have carried out an order. Each stream of a pair takes a connection, a handshake and a receipt."""
        return 3 * (self.connect_s + 2 * self.answer_s + self.limits.stream_s) if measure else self.limits.contact_s


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
        intended = min([*known, _LARGEST]) if known else _DEFAULT_MTU
        largest, sent, lost = self._stream_large(intended) if timed else (None, 0, 0)
        return Contact(
            link=self.link,
            blocked=tuple(sorted((port, result) for port, result in found.items() if isinstance(result, str))),
            largest=largest,
            intended=intended,
            latency_s=latency_s,
            offset_s=offset_s,
            sent=sent,
            lost=lost,
        )

    def flows(self) -> tuple[Flow, ...]:
        """Bandwidth there, back, and both at once; 0 if nothing arrives."""
        there = self._flow(ask_to_take, both=False)
        if not there.gbps:
            # Requests go the same way: the others would only take as long and fail.
            return self.no_flows()
        back = self._flow(ask_to_give, both=False)
        with ThreadPoolExecutor(2, thread_name_prefix="link-flow") as threads:
            return there, back, *threads.map(partial(self._flow, both=True), (ask_to_take, ask_to_give))

    def no_contact(self, waited_s: float) -> Contact:
        """Of a peer that lets `contact` wait for too long."""
        return Contact(link=self.link, blocked=tuple((port, f"no answer in {waited_s:g} s") for port in self.target.tcp_ports))

    def no_flows(self) -> tuple[Flow, ...]:
        return tuple(Flow(link=link, gbps=0.0, both=both) for both in (False, True) for link in (self.link, self.link[::-1]))

    def _try_port(self, port: int) -> tuple[float, float] | str:
        """Round trip and clock offset, or why the port cannot be used."""
        try:
            with self._connected(port) as channel:
                return self._time(channel)
        except ChannelError as error:
            return str(error)

    def _time(self, channel: Channel) -> tuple[float, float]:
        """Shortest round trip in seconds, and the other clock minus this one by the shortest that was asked for."""
        channel.send(responder.REQUEST.pack(responder.ECHO, 0.0), limit_s=self.options.answer_s)
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
        took_s, offset_s = min(found)
        counted = channel.counters()
        # The kernels' own measurement waits for no processor.
        return min(took_s, (counted and counted.least_rtt_s) or took_s), offset_s

    def _stream_large(self, intended: int) -> tuple[int | None, int, int]:
        """Bytes of the largest packet that arrives, TCP segments sent, and how many of them were lost; zeros if unknown."""
        with suppress(ChannelError), self._connected(self._port) as channel:
            channel.send_gently(in_flight_bytes=_IN_FLIGHT_BYTES, bytes_per_s=_BYTES_PER_S)
            begun, options = channel.counters(), self.options
            num_bytes = min(LOSS_SEGMENTS * (begun.segment_bytes if begun else _DEFAULT_MTU), _LOSS_BYTES)
            result = ask_to_take(channel, seconds=options.limits.stream_s, num_bytes=num_bytes, answer_s=options.answer_s)
            if result.num_bytes:
                ended, arrived = channel.counters(), result.segments_in
                return intended, *((ended.segments_out, ended.num_lost(arrived=arrived)) if ended and arrived else (0, 0))
        sizes = [*(size for size in WELL_KNOWN if size < intended), intended]
        with ThreadPoolExecutor(len(sizes), thread_name_prefix="link-mtu") as threads:
            passing = [size for size, arrives in zip(sizes, threads.map(self._arrives, sizes), strict=True) if arrives]
        return max(passing, default=None), 0, 0

    def _arrives(self, size: int) -> bool:
        """Whether a packet of that many bytes arrives. What is written to an idle connection at once is one segment."""
        with suppress(ChannelError), self._connected(self._port) as channel:
            counted, ip_bytes = channel.counters(), 40 if ":" in self.target.address else 20
            payload = size - ip_bytes - (counted.overhead_bytes if counted else 32)
            asked = ask_to_take(channel, seconds=self.options.mtu_wait_s, num_bytes=payload, answer_s=self.options.answer_s)
            return asked.num_bytes == payload
        return False

    def _flow(self, ask: Callable[..., StreamResult], *, both: bool) -> Flow:
        result = StreamResult(0, 0.0, 0.0)
        with suppress(ChannelError), self._connected(self._port) as channel:
            result = ask(channel, seconds=self.options.limits.stream_s, answer_s=self.options.answer_s)
        link = self.link if ask is ask_to_take else self.link[::-1]
        return Flow(link=link, gbps=8e-9 * result.best_bytes_per_s, both=both, waited=round(result.waited, 3))

    def _connected(self, port: int) -> Channel:
        """Three tries: the kernel sends a lost first packet again after a second only. Raises: ChannelError."""
        secret = responder.responder_secret(self.token, bytes.fromhex(self.target.nonce))
        for part in (0.3, 0.3, 1.0):
            channel = None
            try:
                channel = connect(self.target.address, port, source=self.source.address, limit_s=part * self.options.connect_s)
                responder.HANDSHAKE.introduce(channel, secret, limit_s=part * self.options.answer_s)
            except ChannelError as error:
                failure = error
                if channel is not None:
                    channel.close()
            else:
                return channel
        raise failure


def exchange_offset(asked: float, received: float, answered: float, heard: float) -> float:
    """The other clock minus this one; the second and third time are the other's. Source: RFC 5905, section 8."""
    return ((received - asked) + (answered - heard)) / 2
