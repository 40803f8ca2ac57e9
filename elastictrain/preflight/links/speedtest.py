"""The classic speed test between two hosts: one listens, the other one sends it so many bytes, and gets as many back.

Whoever knows the token may use it; both sides are given the same one.
"""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal

from elastictrain.errors import TransportError, UsageError
from elastictrain.net.channel import Channel, ChannelError, connect
from elastictrain.preflight.links.responder import Responder
from elastictrain.preflight.links.streams import HANDSHAKE, ResponderKey, ask_to_give, ask_to_take

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)

MOST_BYTES = 1 << 50


def parse_size(text: str) -> int:
    """Bytes; units are powers of 1024: `64M` is 67108864. Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a size must be a number with K, M, G or T, such as 64M or 10G, but is {text!r}")
    num_bytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if not 1 <= num_bytes <= MOST_BYTES:
        raise UsageError(f"a size must be from 1 byte to 1024T, but is {text!r}")
    return num_bytes


PORT = 29477
"""Where it listens, if nothing else is said."""

LIMIT_S = 600.0
"""One transfer takes no longer; 10G at 1 Gbit/s take 86 s."""

_CONNECT_S = 5.0
_ANSWER_S = 5.0
_STALL_S = 10.0
_MOST_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Transfer:
    """One direction. The rate is over all of it, in 10^9 bits of payload per second."""

    num_bytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """0 for a transfer that took no time that can be told."""
        return 8e-9 * self.num_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """One way there, one way back, and both at the same time."""

    there: Transfer
    back: Transfer
    both_there: Transfer
    both_back: Transfer


class Listener:
    """The side that waits, until it is closed."""

    def __init__(self, address: str, *, port: int = PORT, token: str) -> None:
        self._responder = Responder(
            address, ports=(port,), connections=_MOST_CONNECTIONS, most_seconds=LIMIT_S, nonce=_nonce(token)
        )
        self._token = token

    def start(self) -> int:
        """Begin to listen; returns the port. Raises: HostUnfitError naming address and port."""
        self._responder.start()
        self._responder.set_token(self._token.encode())
        return self._responder.tcp_ports[0]

    def close(self) -> None:
        """End, also what is on its way."""
        self._responder.close()


def measure_speed(address: str, *, port: int = PORT, token: str, size_bytes: int, limit_s: float = LIMIT_S) -> Speeds:
    """Send `size_bytes` to a listener, get as many back, and then both at once. Memory does not depend on the size.

    Raises: TransportError naming the address, also if not all bytes came within `limit_s`.
    """
    place = _Place(address, port, ResponderKey(token.encode(), _nonce(token)), size_bytes, limit_s)
    there, back = place.send(), place.receive()
    sent: list[Transfer | TransportError] = []

    def send() -> None:
        try:
            sent.append(place.send())
        except TransportError as error:
            sent.append(error)

    sending = threading.Thread(target=send, name="speed-there", daemon=True)
    sending.start()
    both_back = place.receive()
    sending.join()
    if isinstance(sent[0], TransportError):
        raise sent[0]
    return Speeds(there, back, sent[0], both_back)


@dataclass(frozen=True, slots=True)
class _Place:
    address: str
    port: int
    key: ResponderKey
    size_bytes: int
    limit_s: float

    def send(self) -> Transfer:
        """Raises: TransportError."""
        with self._connected() as channel:
            began = time.monotonic()
            found = ask_to_take(channel, seconds=self.limit_s, num_bytes=self.size_bytes, answer_s=_ANSWER_S)
            return self._whole(found.num_bytes, time.monotonic() - began)

    def receive(self) -> Transfer:
        """Raises: TransportError."""
        with self._connected() as channel:
            began = time.monotonic()
            found = ask_to_give(channel, seconds=self.limit_s, num_bytes=self.size_bytes, idle_s=_STALL_S)
            return self._whole(found.num_bytes, time.monotonic() - began)

    @contextmanager
    def _connected(self) -> Iterator[Channel]:
        try:
            with connect(self.address, self.port, limit_s=_CONNECT_S) as channel:
                HANDSHAKE.introduce(channel, self.key.secret, limit_s=_ANSWER_S)
                yield channel
        except ChannelError as error:
            raise TransportError(
                f"no speed test with {self.address}, port {self.port}: {error}; start the listening side there with the same "
                f"token, and let TCP port {self.port} through"
            ) from error

    def _whole(self, num_bytes: int, seconds: float) -> Transfer:
        if num_bytes != self.size_bytes:
            raise TransportError(
                f"only {num_bytes} of {self.size_bytes} bytes came between here and {self.address} in {seconds:.1f} s: choose "
                f"a smaller size, or run the link checks to see what is wrong"
            )
        return Transfer(num_bytes, seconds)


def _nonce(token: str) -> bytes:
    """The listener cannot tell its nonce to anybody beforehand."""
    return hashlib.sha256(b"speed test " + token.encode()).digest()[:16]
