"""Protocol between a host's responder and its peers: requests, byte streams and their rates. The responder serves peers with
the preflight's token, on the plan's address. Its nonce proves that it is the host that introduced itself."""

import math
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path

from elastictrain.errors import HostUnfitError
from elastictrain.net.channel import Channel, ChannelError, Handshake, Secret
from elastictrain.net.listening import listen
from elastictrain.net.server import ChannelServer

HANDSHAKE = Handshake(magic=b"ETLINK03", nonce_bytes=16, separator=b"|")

ECHO, SINK, GIVE = b"E", b"S", b"G"
REQUEST = struct.Struct("<cd")  # kind, seconds
PING = struct.Struct("<d")
PONG = struct.Struct("<dd")  # when the ping arrived and when the answer left, by the responder's clock

# Bytes received, best rate on the way in bytes per second, part of the time without a processor, TCP segments received.
RECEIPT = struct.Struct("<QddI")
TRAILER = struct.Struct("<d")  # ends a stream that is given: part of the time without a processor
LEAST_SLICE_S = 0.08  # long enough to smooth a burst allowance or a buffer; a shorter total counts as one slice
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_CHUNK_BYTES = 1 << 20
_LATE_S = 0.2
_STALL_S = 10.0
_IDLE_S = 2.0
_MOST_SECONDS = 10.0  # of one stream
_MOST_PINGS = 1000


def responder_secret(token: bytes, nonce: bytes) -> Secret:
    """For connections. The client's proof leaves out the nonce: the client is the one that detects a wrong host."""
    return Secret(token, client=b"client|", server=b"responder|" + nonce.hex().encode())


def read_waiting() -> tuple[float, float]:
    """Monotonic time, and the seconds this thread has been ready to run without a processor; NaN if the kernel does not tell.
    Source: Documentation/scheduler/sched-stats.rst of Linux, /proc/<pid>/schedstat."""
    try:
        return time.monotonic(), 1e-9 * int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return time.monotonic(), math.nan


def part_waited(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Part of the time, 0 to 1, that the thread waited for a processor; 0 if unknown."""
    passed_s, waited_s = after[0] - before[0], after[1] - before[1]
    return min(1.0, max(0.0, waited_s / passed_s)) if passed_s > 0 and not math.isnan(waited_s) else 0.0


@dataclass(slots=True)
class Meter:
    num_bytes: int = 0
    _marks: list[tuple[float, int]] = field(default_factory=list, init=False)

    def add(self, count: int, *, now_s: float) -> None:
        self.num_bytes += count
        if len(self._marks) > 1 and now_s - self._marks[-2][0] < LEAST_SLICE_S / 8:
            # Memory stays bounded on a long stream.
            self._marks.pop()
        self._marks.append((now_s, self.num_bytes))

    def best_bytes_per_s(self) -> float:
        """Rate of the best stretch of at least `LEAST_SLICE_S`: a busy processor makes one slower, never faster."""
        marks, best, left = self._marks, 0.0, 0
        for right in range(1, len(marks)):
            while left + 1 < right and marks[right][0] - marks[left + 1][0] >= LEAST_SLICE_S:
                left += 1
            length_s = marks[right][0] - marks[left][0]
            if length_s >= LEAST_SLICE_S:
                best = max(best, (marks[right][1] - marks[left][1]) / length_s)
        if best == 0.0 and marks and (seconds := marks[-1][0] - marks[0][0]) > 0:
            best = (self.num_bytes - marks[0][1]) / seconds
        return best


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What the taking end counted."""

    num_bytes: int
    best_bytes_per_s: float
    waited: float  # part of the time in which an end had no processor
    segments_in: int = 0  # data segments that the taking end received; 0: unknown


def ask_to_take(channel: Channel, *, seconds: float, num_bytes: int = 0, answer_s: float) -> StreamResult:
    """Send for that long, or that many bytes. Raises: ChannelError without a receipt."""
    channel.send(REQUEST.pack(SINK, seconds), limit_s=answer_s)
    deadline, ours = time.monotonic() + seconds, 0.0
    # The other side sends its receipt by its own clock, whether or not all bytes arrived by then.
    with suppress(ChannelError):
        ours = send_for(channel, seconds=seconds, max_bytes=num_bytes)
        channel.end_sending()
    left_s = max(0.0, deadline - time.monotonic())
    found = StreamResult(*RECEIPT.unpack(channel.receive(RECEIPT.size, limit_s=left_s + answer_s)))
    return replace(found, waited=_either(ours, found.waited))


def ask_to_give(channel: Channel, *, seconds: float, answer_s: float) -> StreamResult:
    """Receive for that long, until nothing arrives for `answer_s`. Raises: ChannelError."""
    channel.send(REQUEST.pack(GIVE, seconds), limit_s=answer_s)
    found, tail = drain(channel, seconds=seconds, idle_s=answer_s)
    theirs = TRAILER.unpack(tail)[0] if len(tail) == TRAILER.size else 0.0
    return replace(found, waited=_either(found.waited, theirs))


def send_for(channel: Channel, *, seconds: float, max_bytes: int = 0) -> float:
    """Send zeros for that long, or that many bytes; returns the part of the time without a processor. Raises: ChannelError."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    sent, deadline, before = 0, time.monotonic() + seconds, read_waiting()
    while (left_s := deadline - time.monotonic()) > 0 and (not max_bytes or sent < max_bytes):
        piece = chunk[: max_bytes - sent] if max_bytes else chunk
        try:
            sent += channel.send_some(piece, limit_s=min(left_s, _STALL_S))
        except ChannelError:
            if time.monotonic() < deadline:
                raise
    return part_waited(before, read_waiting())


def drain(channel: Channel, *, seconds: float, idle_s: float) -> tuple[StreamResult, bytes]:
    """Read until the other side ends, the time is over, or nothing comes for `idle_s`. Also returns the bytes of a trailer."""
    buffer, meter, tail = memoryview(bytearray(_CHUNK_BYTES)), Meter(), b""
    deadline, before = time.monotonic() + seconds + _LATE_S, read_waiting()
    with suppress(ChannelError):
        while (left_s := deadline - time.monotonic()) > 0:
            count = channel.receive_some(buffer, limit_s=min(idle_s, left_s))
            if not count:
                break
            meter.add(count, now_s=time.monotonic())
            tail = (tail + bytes(buffer[max(0, count - TRAILER.size) : count]))[-TRAILER.size :]
    waited, counted = part_waited(before, read_waiting()), channel.counters()
    return StreamResult(meter.num_bytes, meter.best_bytes_per_s(), waited, counted.segments_in if counted else 0), tail


def _either(ours: float, theirs: float) -> float:
    """Part of the time in which an end had no processor. A stream that was cut off ends in arbitrary bytes: ignore those."""
    return 1 - (1 - ours) * (1 - (theirs if 0.0 <= theirs <= 1.0 else 0.0))


def start_responder(address: str, ports: Sequence[int] = (0,), *, wall: Callable[[], float] = time.time) -> ChannelServer:
    """Listens on TCP `ports` (0 is any free one) until it is closed. Peers that connect before `set_secret` wait a moment for
    it. `wall`: the clock that peers compare with theirs. Raises: HostUnfitError naming address and port."""
    try:
        listeners = listen(address, ports)
    except OSError as error:
        where, why = f"{address}, ports {list(ports)} (0: any)", error.strerror or error
        choose = "choose an address of this host and ports that are free"
        raise HostUnfitError(f"link checks must listen on {where}, but cannot: {why}; {choose}") from error
    server = ChannelServer(listeners, handshake=HANDSHAKE, serve=partial(_serve, wall=wall), place_s=_IDLE_S, name="links")
    server.start()
    return server


def _serve(channel: Channel, *, wall: Callable[[], float]) -> None:
    kind, seconds = REQUEST.unpack(channel.receive(REQUEST.size, limit_s=_IDLE_S))
    if kind == ECHO:
        for _ in range(_MOST_PINGS):
            channel.receive(PING.size, limit_s=_IDLE_S)
            came = wall()
            channel.send(PONG.pack(came, wall()), limit_s=_IDLE_S)
        return
    if kind not in (SINK, GIVE) or not 0 < seconds <= _MOST_SECONDS:
        raise ChannelError(f"it asks for {kind!r} for {seconds} s")
    if kind == SINK:
        found, _ = drain(channel, seconds=seconds, idle_s=_IDLE_S)
        channel.send(RECEIPT.pack(*astuple(found)), limit_s=_IDLE_S)
    else:
        channel.send(TRAILER.pack(send_for(channel, seconds=seconds)), limit_s=_IDLE_S)
        channel.end_sending()
