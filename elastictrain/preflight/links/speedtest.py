"""Speed test between two hosts: one listens, the other sends it a number of bytes and gets as many back. Both use one token."""

import hashlib
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

from elastictrain.errors import TransportError, UsageError
from elastictrain.net.channel import ChannelError, connect
from elastictrain.preflight.links.responder import HANDSHAKE, Responder, ResponderKey, StreamResult, ask_to_give, ask_to_take

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)

MOST_BYTES = 1 << 50
PORT = 29477  # the listener's default
LIMIT_S = 600.0  # one transfer takes no longer; 10G at 1 Gbit/s take 86 s
_ANSWER_S = 5.0


def parse_size(text: str) -> int:
    """Bytes; units are powers of 1024: `64M` is 67108864. Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a size must be a number with K, M, G or T, such as 64M or 10G, but is {text!r}")
    num_bytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if not 1 <= num_bytes <= MOST_BYTES:
        raise UsageError(f"a size must be from 1 byte to 1024T, but is {text!r}")
    return num_bytes


def listen(address: str, *, port: int = PORT, token: str) -> Responder:
    """The listening side, until it is closed. Raises: HostUnfitError naming address and port."""
    responder = Responder(address, ports=(port,), connections=4, most_seconds=LIMIT_S, nonce=_key(token).nonce)
    responder.start()
    responder.set_token(token.encode())
    return responder


def measure_speed(address: str, *, port: int = PORT, token: str, size_bytes: int, limit_s: float = LIMIT_S) -> list[float]:
    """Send `size_bytes`, get as many back, then do both at once; returns the seconds there, back, there and back at the same
    time. Memory does not depend on the size. Raises: TransportError naming the address, also if bytes are missing after
    `limit_s`."""

    def transfer(ask: Callable[..., StreamResult], answer_s: float) -> float:
        try:
            with connect(address, port, limit_s=5.0) as channel:
                HANDSHAKE.introduce(channel, _key(token).secret, limit_s=_ANSWER_S)
                began = time.monotonic()
                num_bytes = ask(channel, seconds=limit_s, num_bytes=size_bytes, answer_s=answer_s).num_bytes
                seconds = time.monotonic() - began
        except ChannelError as error:
            raise TransportError(
                f"no speed test with {address}, port {port}: {error}; start the listening side there with the same token, and "
                f"let TCP port {port} through"
            ) from error
        if num_bytes != size_bytes:
            raise TransportError(
                f"only {num_bytes} of {size_bytes} bytes came between here and {address} in {seconds:.1f} s: choose a smaller "
                f"size, or run the link checks to see what is wrong"
            )
        return seconds

    ways = (ask_to_take, ask_to_give), (_ANSWER_S, 10.0)
    with ThreadPoolExecutor(2, thread_name_prefix="speed") as threads:
        return [*map(transfer, *ways), *threads.map(transfer, *ways)]


def _key(token: str) -> ResponderKey:
    """The nonce follows from the token: the listener cannot send its own to the other side beforehand."""
    return ResponderKey(token.encode(), hashlib.sha256(b"speed test " + token.encode()).digest()[:16])
