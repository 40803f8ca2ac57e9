"""The kernel's counters of connections on loopback."""

import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from elastictrain.net.tcp_info import TcpCounters, read_counters

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these counters")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def counters(connection: socket.socket) -> TcpCounters:
    found = read_counters(connection)
    assert found is not None
    return found


def test_both_ends_count_the_same_segments(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    for _ in range(7):
        near.sendall(b"one segment")
        assert far.recv(100) == b"one segment"
    ours, theirs = counters(near), counters(far)
    assert (ours.segments_out, ours.segments_in, ours.retransmitted) == (7, 0, 0)
    assert (theirs.segments_in, theirs.segments_out) == (7, 0)
    assert ours.least_rtt_s is not None
    assert 0 < ours.least_rtt_s < 0.1


def test_sizes_add_up_to_the_largest_packet(pair: tuple[socket.socket, socket.socket]) -> None:
    found = counters(pair[0])
    assert found.overhead_bytes in (20, 32)
    # Linux's loopback has an MTU of 65536 and IPv4 packets of 65535 bytes at most, but its segments may begin smaller.
    assert 500 < found.segment_bytes + found.overhead_bytes + 20 <= 65536


def test_lost_segments_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the offsets of the kernel's structure."""
    data = bytearray(232)
    struct.pack_into("=B", data, 5, 1)
    for offset, value in ((16, 1448), (100, 3), (148, 250), (152, 40), (156, 50)):
        struct.pack_into("=I", data, offset, value)

    class Known:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
            return bytes(data[:size])

    expected = TcpCounters(
        segments_out=50,
        segments_in=40,
        retransmitted=3,
        segment_bytes=1448,
        overhead_bytes=32,
        least_rtt_s=pytest.approx(2.5e-4),
    )
    assert read_counters(Known()) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("retransmitted", "arrived", "lost"),
    [
        (0, 100, 0),
        (5, 95, 5),
        (7, 98, 2),  # five of them in vain
        (3, 100, 0),  # all of them in vain
        (2, 80, 2),  # 18 are on the way
        (0, 90, 0),
        (4, 103, 0),  # a card that joins segments counts as it likes
    ],
)
def test_only_what_was_lost_counts(retransmitted: int, arrived: int, lost: int) -> None:
    found = TcpCounters(100, 0, retransmitted, segment_bytes=1448, overhead_bytes=32, least_rtt_s=None)
    assert found.num_lost(arrived=arrived) == lost


def test_an_old_kernel_tells_nothing() -> None:
    class Old:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            return bytes(104)

    assert read_counters(Old()) is None  # type: ignore[arg-type]
