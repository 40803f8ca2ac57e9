"""The path MTU towards a host: datagrams that must not be fragmented, of several sizes, each to be acknowledged.

A TCP connection hangs where large frames vanish and nobody says so; asking the kernel does not help, for it does not know.
"""

import socket
import time
from collections.abc import Callable, Sequence

from elastictrain.preflight.links.wire import FRAME_BYTES, Secret, probe_frame, read_answer

SMALLEST = 576
"""Every IPv4 host takes packets of this size. Source: RFC 791."""

LARGEST = 65535
"""The total length of an IPv4 packet has 16 bits; that of loopback is 65536."""

WELL_KNOWN = (1280, 1400, 1420, 1440, 1450, 1460, 1472, 1480, 1492, 1500, 2000, 4000, 8000, 8500, 8896, 8950, 9000, 9001)
"""MTUs of tunnels, PPPoE, Ethernet and clouds; of each, one byte more is tried as well, so that one round finds it."""

_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
# Linux; Python's socket module has no names for them before 3.14.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_TRIES = 3
_NUM_BETWEEN = 6
_MOST_SEARCHES = 5


def candidates(passing: int, lost: int) -> tuple[int, ...]:
    """Sizes to try next, where `passing` bytes pass and `lost` do not: none if nothing is between them."""
    known = {size for mtu in WELL_KNOWN for size in (mtu, mtu + 1)}
    step = max(1, (lost - passing) // (_NUM_BETWEEN + 1))
    spread = range(passing + step, lost, step)
    return tuple(sorted(size for size in known | set(spread) if passing < size < lost))


class PathProbe:
    """Sends to one host, from one address; the packets that it speaks of include the headers of IP and UDP."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        source: str,
        secret: Secret,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = (address, port)
        self._source = source
        self._secret = secret
        self._wait_s = wait_s
        self._clock = clock
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def largest(self, intended: int) -> int:
        """Bytes of the largest packet that arrives, `intended` at the most; 0 if none is acknowledged.

        Takes a round trip where all is well, and at most four times `wait_s` otherwise. Raises: OSError without a way there.
        """
        top = max(SMALLEST, min(intended, LARGEST))
        with socket.socket(self._family, socket.SOCK_DGRAM) as datagrams:
            self._forbid_fragments(datagrams)
            datagrams.bind((self._source, 0))
            datagrams.connect(self._place)
            passed = self._ask(datagrams, [SMALLEST, top], enough=top, wait_s=self._wait_s)
            if top in passed or not passed:
                return max(passed, default=0)
            passing, lost = SMALLEST, top
            for _ in range(_MOST_SEARCHES):
                sizes = candidates(passing, lost)
                if not sizes:
                    break
                passed = self._ask(datagrams, sizes, enough=sizes[-1], wait_s=self._wait_s / 2)
                passing = max([passing, *passed])
                lost = min([lost, *(size for size in sizes if size > passing)])
            return passing

    def _forbid_fragments(self, datagrams: socket.socket) -> None:
        if self._family == socket.AF_INET6:
            datagrams.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        else:
            datagrams.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)

    def _ask(self, datagrams: socket.socket, sizes: Sequence[int], *, enough: int, wait_s: float) -> set[int]:
        """Which sizes arrived. Each is sent a few times, for any packet may be lost; `enough` ends the waiting."""
        passed: set[int] = set()
        began = self._clock()
        for attempt in range(_TRIES):
            for size in sizes:
                if size not in passed:
                    self._send(datagrams, size)
            until = began + wait_s * (attempt + 1) / _TRIES
            while enough not in passed and (left_s := until - self._clock()) > 0:
                number = self._hear(datagrams, limit_s=left_s)
                if number in sizes:
                    passed.add(number)
            if enough in passed:
                break
        return passed

    def _send(self, datagrams: socket.socket, size: int) -> None:
        payload = size - _HEADERS[self._family]
        try:
            datagrams.send(probe_frame(self._secret, size, size=max(payload, FRAME_BYTES)))
        except OSError:
            # Larger than the interface takes, or word of an earlier one: this size is not acknowledged then.
            return

    def _hear(self, datagrams: socket.socket, *, limit_s: float) -> int:
        try:
            datagrams.settimeout(limit_s)
            number = read_answer(self._secret, datagrams.recv(FRAME_BYTES))
        except TimeoutError:
            return 0
        except OSError:
            # Word of an earlier datagram that was refused.
            time.sleep(0.001)
            return 0
        return number or 0
