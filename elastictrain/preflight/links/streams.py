"""What passes between a host's responder and whoever asks it: requests, streams of bytes and their rates, probe datagrams.

The nonce of the responder shows that the host at an address is the one that introduced itself.
"""

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastictrain.net.channel import SIGNATURE_BYTES, Channel, ChannelError, Handshake, Secret, is_signed, signature

HANDSHAKE = Handshake(magic=b"ETLINK01", nonce_bytes=16, separator=b"|")

ECHO, SINK, GIVE = b"E", b"S", b"G"
REQUEST = struct.Struct("<cdQ")
"""What is wanted, for how many seconds, and at most how many bytes (0: no matter)."""

PING = struct.Struct("<d")
PONG = struct.Struct("<dd")
"""When the question came, and when the answer left, by the clock of the one that answers."""

RECEIPT = struct.Struct("<Qdd")
"""Bytes that came, the best rate on the way in bytes per second, and the part of the time without a processor."""

TRAILER = struct.Struct("<d")
"""The end of what is given: the part of the time without a processor."""

_CHUNK_BYTES = 1 << 20
_LATE_S = 0.2
_STALL_S = 10.0
_IDLE_S = 2.0

_FRAME = struct.Struct("<4scII")
_FRAME_MAGIC = b"ETfr"
_PROBE, _ACK = b"P", b"A"

FRAME_BYTES = _FRAME.size + SIGNATURE_BYTES
"""The least that a datagram must have."""


@dataclass(frozen=True, slots=True)
class ResponderKey:
    """What two sides share: the token, and the nonce of the responder."""

    token: bytes
    nonce: bytes

    @property
    def secret(self) -> Secret:
        """For connections. The client's proof is without the nonce: it is the client that must find out about another host."""
        return Secret(self.token, client=b"client|", server=b"responder|" + self.nonce.hex().encode())

    def probe(self, number: int, *, size: int) -> bytes:
        """A datagram of `size` bytes (at least `FRAME_BYTES`)."""
        return self._frame(_PROBE, number, size).ljust(size, b"\0")

    def answer(self, data: bytes) -> bytes | None:
        """What to answer to a datagram; None for one that is no probe under this token. Never more than came."""
        found = self._read(_PROBE, data)
        return None if found is None or found[1] != len(data) else self._frame(_ACK, found[0], len(data))

    def acknowledged(self, data: bytes) -> int | None:
        """The number of the probe that arrived; None if this is no answer to one."""
        found = self._read(_ACK, data)
        return None if found is None else found[0]

    def _frame(self, kind: bytes, number: int, size: int) -> bytes:
        head = _FRAME.pack(_FRAME_MAGIC, kind, number, size)
        return head + signature(self._context + head, self.token)

    def _read(self, kind: bytes, data: bytes) -> tuple[int, int] | None:
        if len(data) < FRAME_BYTES:
            return None
        head = data[: _FRAME.size]
        magic, found, number, size = _FRAME.unpack(head)
        genuine = is_signed(self._context + head, data[_FRAME.size : FRAME_BYTES], self.token)
        return (number, size) if genuine and (magic, found) == (_FRAME_MAGIC, kind) else None

    @property
    def _context(self) -> bytes:
        return b"frame|" + self.nonce.hex().encode() + b"|"


_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def read_waited_s() -> float | None:
    """How long this thread has been ready to run and had no processor; None if the kernel does not tell.

    Source: Documentation/scheduler/sched-stats.rst of Linux, /proc/<pid>/schedstat.
    """
    try:
        return 1e-9 * int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class ProcessorWait:
    """How long one thread waits for a processor, from its making on."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, read: Callable[[], float | None] = read_waited_s
    ) -> None:
        self._clock = clock
        self._read = read
        self._began = clock()
        self._before = read()

    def part(self) -> float:
        """From 0 to 1: the part of the time that it waited. What is unknown counts as none."""
        now, passed_s = self._read(), self._clock() - self._began
        if now is None or self._before is None or passed_s <= 0:
            return 0.0
        return min(1.0, max(0.0, (now - self._before) / passed_s))


LEAST_SLICE_S = 0.08
"""A slice this long smooths what a burst allowance or a buffer lets through; a shorter total counts as one."""


class Meter:
    """Counts bytes as they come, and keeps the last few in `tail`.

    The best rate is that of the best stretch: a busy processor makes a stretch slower, never faster.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.tail = b""
        self._marks: list[tuple[float, int]] = []
        self._last = (0.0, 0)

    def add(self, count: int, *, now_s: float) -> None:
        """So many more have come."""
        self.num_bytes += count
        if not self._marks or now_s - self._marks[-1][0] >= LEAST_SLICE_S / 8:
            self._marks.append((now_s, self.num_bytes))
        self._last = (now_s, self.num_bytes)

    def seconds(self) -> float:
        """From the first bytes to the last."""
        return self._last[0] - self._marks[0][0] if self._marks else 0.0

    def best_bytes_per_s(self) -> float:
        """Over stretches of at least `LEAST_SLICE_S`; 0 if next to nothing came."""
        marks = [*self._marks, self._last] if self._marks else []
        best, left = 0.0, 0
        for right in range(1, len(marks)):
            while left + 1 < right and marks[right][0] - marks[left + 1][0] >= LEAST_SLICE_S:
                left += 1
            length_s = marks[right][0] - marks[left][0]
            if length_s >= LEAST_SLICE_S:
                best = max(best, (marks[right][1] - marks[left][1]) / length_s)
        if best == 0.0 and self.seconds() > 0:
            best = (self.num_bytes - self._marks[0][1]) / self.seconds()
        return best


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one stream of bytes came to. `waited`: the part of the time in which not both ends had a processor."""

    num_bytes: int
    best_bytes_per_s: float
    waited: float


def ask_to_take(channel: Channel, *, seconds: float, num_bytes: int = 0, answer_s: float) -> StreamResult:
    """Send for so long, or so many bytes. Raises: ChannelError without a receipt."""
    channel.send(REQUEST.pack(SINK, seconds, 0), limit_s=answer_s)
    deadline, ours = time.monotonic() + seconds, 0.0
    # The other side gives a receipt by its own clock, whether or not all has come by then.
    with suppress(ChannelError):
        ours = send_for(channel, seconds=seconds, most_bytes=num_bytes)
    left_s = max(0.0, deadline - time.monotonic())
    came, best, theirs = RECEIPT.unpack(channel.receive(RECEIPT.size, limit_s=left_s + answer_s))
    return StreamResult(came, best, _either(ours, theirs))


def ask_to_give(channel: Channel, *, seconds: float, num_bytes: int = 0, idle_s: float) -> StreamResult:
    """Receive for so long, or so many bytes, until nothing comes for `idle_s`. Raises: ChannelError."""
    waiting = ProcessorWait()
    channel.send(REQUEST.pack(GIVE, seconds, num_bytes), limit_s=idle_s)
    meter = drain(channel, seconds=seconds, idle_s=idle_s)
    theirs = TRAILER.unpack(meter.tail)[0] if len(meter.tail) == TRAILER.size else 0.0
    came = max(0, meter.num_bytes - TRAILER.size)
    return StreamResult(came, meter.best_bytes_per_s(), _either(waiting.part(), theirs))


def send_for(channel: Channel, *, seconds: float, most_bytes: int = 0, trailed: bool = False) -> float:
    """Send zeros for so long, or so many bytes, and end, if `trailed` with a `TRAILER`.

    Returns the part of the time without a processor.

    Raises: ChannelError, also if there is no more room for `_STALL_S`.
    """
    chunk = memoryview(bytes(_CHUNK_BYTES))
    sent, deadline, waiting = 0, time.monotonic() + seconds, ProcessorWait()
    while (left_s := deadline - time.monotonic()) > 0 and (not most_bytes or sent < most_bytes):
        piece = chunk[: most_bytes - sent] if most_bytes else chunk
        try:
            sent += channel.send_some(piece, limit_s=min(left_s, _STALL_S))
        except ChannelError:
            if time.monotonic() < deadline:
                raise
    part = waiting.part()
    if trailed:
        channel.send(TRAILER.pack(part), limit_s=_IDLE_S)
    channel.end_sending()
    return part


def drain(channel: Channel, *, seconds: float, idle_s: float) -> Meter:
    """Read until the other side ends or breaks off, the time is over, or nothing has come for `idle_s`."""
    buffer, meter, deadline = memoryview(bytearray(_CHUNK_BYTES)), Meter(), time.monotonic() + seconds + _LATE_S
    with suppress(ChannelError):
        while (left_s := deadline - time.monotonic()) > 0:
            count = channel.receive_some(buffer, limit_s=min(idle_s, left_s))
            if not count:
                break
            meter.add(count, now_s=time.monotonic())
            meter.tail = (meter.tail + bytes(buffer[max(0, count - TRAILER.size) : count]))[-TRAILER.size :]
    return meter


def _either(ours: float, theirs: float) -> float:
    """The part of the time in which not both had a processor. A stream that was cut off ends with anything."""
    return 1 - (1 - ours) * (1 - (theirs if 0.0 <= theirs <= 1.0 else 0.0))
