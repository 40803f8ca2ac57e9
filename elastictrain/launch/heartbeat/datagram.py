"""What launchers send each other, signed with the run's token. Pure."""

import json
from dataclasses import asdict, dataclass, replace

from elastictrain.launch.membership.records import HostRecord, decode
from elastictrain.net.channel import SIGNATURE_BYTES, is_signed, signature

_LARGEST_BYTES = 512
"""Fits into the smallest frame that any network has: a path that swallows large ones must not silence this."""

_LARGEST_LINE_BYTES = 1232
"""With a line: what every path of IPv6 lets through whole. Whoever it does not reach reads the line in storage."""

_REASONS = (300, 100, 0)
"""Characters of a reason that are sent: as many as fit."""

_HEADER_BYTES = 300

_MOST_SENDERS = 4096


@dataclass(frozen=True, slots=True)
class HeartbeatDatagram:
    """A sign of life."""

    host: str
    to: str
    """The launcher that it is meant for. Every start of a launcher has a name of its own."""

    counter: int
    """Larger than in all that this launcher has sent before."""

    generation: int
    """The newest one that this host knows."""

    ended: bool
    """Whether it has ended in the eyes of this host: its record then tells why."""

    line: HostRecord | None = None
    """What the host says of itself, without whom it hears."""


def seal(datagram: HeartbeatDatagram, *, token: bytes) -> bytes:
    """One datagram."""
    fields = [datagram.host, datagram.to, datagram.counter, datagram.generation, datagram.ended]
    body = json.dumps(fields if datagram.line is None else [*fields, asdict(datagram.line)]).encode()
    return signature(body, token) + body


def shortened(line: HostRecord) -> HostRecord | None:
    """A line as it is sent: without whom the host hears, and with the begin of a long reason. None if even that is too long."""
    for most in _REASONS:
        end = line.end and replace(line.end, reason=line.end.reason[:most])
        short = replace(line, hears=(), writers=(), reason=line.reason[:most], end=end)
        if len(json.dumps(asdict(short))) <= _LARGEST_LINE_BYTES - _HEADER_BYTES:
            return short
    return None


def unseal(data: bytes, *, token: bytes) -> HeartbeatDatagram | None:
    """The word in a datagram; None if it is of another run, or none at all."""
    body = data[SIGNATURE_BYTES:]
    if len(data) > _LARGEST_LINE_BYTES or not is_signed(body, data[:SIGNATURE_BYTES], token):
        return None
    try:
        host, to, counter, generation, ended, *rest = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(host, str) or not isinstance(to, str) or not isinstance(ended, bool):
        return None
    if type(counter) is not int or type(generation) is not int:
        return None
    if not rest:
        return HeartbeatDatagram(host, to, counter, generation, ended) if len(data) <= _LARGEST_BYTES else None
    line = decode(HostRecord, json.dumps(rest[0]).encode()) if len(rest) == 1 else None
    return HeartbeatDatagram(host, to, counter, generation, ended, line) if line is not None and line.host == host else None


class ReplayGuard:
    """Lets each word through once, and in the order in which its sender sent them.

    Nothing is kept between starts: both launchers have other names then, so that no earlier word is meant for this one.
    """

    def __init__(self, own: str) -> None:
        """`own`: the name of this launcher."""
        self._own = own
        self._last: dict[str, int] = {}
        self.num_dropped = 0

    def passes(self, datagram: HeartbeatDatagram) -> bool:
        """Whether it is meant for this launcher, and newer than all that came from its sender."""
        if datagram.to != self._own or datagram.counter <= self._last.get(datagram.host, 0):
            self.num_dropped += 1
            return False
        # Those that are heard stay: who has the token could fill the memory of this host otherwise.
        self._last.pop(datagram.host, None)
        self._last[datagram.host] = datagram.counter
        if len(self._last) > _MOST_SENDERS:
            del self._last[next(iter(self._last))]
        return True
