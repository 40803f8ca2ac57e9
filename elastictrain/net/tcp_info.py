"""What the kernel counts about one TCP connection (Linux)."""

import socket
import struct
from dataclasses import dataclass

_FIELDS = struct.Struct("=5xB10xI80xI44x3I")
"""Options, segment size, retransmissions, smallest round trip in microseconds, data segments in and out.
Source: struct tcp_info in include/uapi/linux/tcp.h of Linux 4.6 and newer; later kernels only append fields."""

_TIMESTAMPS, _TIMESTAMP_BYTES = 1, 12


@dataclass(frozen=True, slots=True)
class TcpCounters:
    """Counts since the connection was made. `segments`: data segments, first ones and retransmitted ones alike."""

    segments_out: int
    segments_in: int
    retransmitted: int
    segment_bytes: int  # of payload, in the largest segment that this side sends
    overhead_bytes: int  # TCP's own header and options in each segment
    least_rtt_s: float | None  # between the two kernels: no process has to run for it; None: not measured

    def num_lost(self, *, arrived: int) -> int:
        """Data segments that were lost, where the other end has counted `arrived` ones. What was sent again for nothing has
        arrived, too, and what is still on the way was not sent again: neither counts."""
        return min(self.retransmitted, max(0, self.segments_out - arrived))


def read_counters(connection: socket.socket) -> TcpCounters | None:
    """None where the kernel does not tell."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
        options, segment, retransmitted, rtt_us, segments_in, segments_out = _FIELDS.unpack(data)
    except (OSError, AttributeError, struct.error):
        return None
    overhead = 20 + (_TIMESTAMP_BYTES if options & _TIMESTAMPS else 0)
    rtt_s = 1e-6 * rtt_us if 0 < rtt_us < 1 << 31 else None
    return TcpCounters(segments_out, segments_in, retransmitted, segment, overhead, rtt_s)
