"""Thresholds and deadlines of the link checks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Times in seconds. The defaults fit hosts of one data centre."""

    roster_s: float = 60.0
    """How long the first host waits for the others to introduce themselves."""

    grace_s: float = 1.0
    """How much later than its own limit somebody's word may come before he counts as silent."""

    take_s: float = 2.0
    """Until a host that has nothing else to do has taken up an order."""

    connect_s: float = 1.0
    """Setting up a TCP connection: a first packet that is lost is sent again after one second, and is not waited for; what
    failed is tried a second time."""

    answer_s: float = 1.0
    """One answer of a host that is connected."""

    mtu_wait_s: float = 0.45
    """Until a large frame that was not acknowledged counts as lost. Healthy links answer in a millisecond."""

    contact_s: float = 4.0
    """All that one host asks of its peers at a time: more than connecting, answering and the search for an MTU together."""

    stream_s: float = 0.3
    """How long bytes flow in one direction."""

    all_pairs_up_to: int = 16
    """Up to so many hosts a full check contacts every pair; above, distances of 1, 2, 4, 8 and so on along the ring."""

    slow_ratio: float = 0.5
    """Below this part of the median of all hosts' best links, bandwidth is too low.

    Source: measured with 3 and 4 hosts; right for 100 Mbit/s in either or both directions, +20 ms and 2 % loss.
    """

    late_factor: float = 3.0
    """Above so many times the median of all hosts' best links, and `late_floor_s` more than it, latency is too high."""

    late_floor_s: float = 0.005
    """Less than this is what a busy processor adds."""

    clock_warn_s: float = 1.0
    clock_fail_s: float = 2.0
    """Rendezvous compares wall clocks; up to 10 s were harmless, 20 s split a group in two."""

    def measure_s(self) -> float:
        """What the streams of one pair take at the most, each with connecting, a handshake and a receipt."""
        return 3 * (self.connect_s + 2 * self.answer_s + self.stream_s)
