"""What one host measures of its way to another, on loopback."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elastictrain.config.preflight import PreflightLimits
from elastictrain.net.channel import Channel, ChannelError
from elastictrain.preflight.links import probes
from elastictrain.preflight.links.messages import Contact
from elastictrain.preflight.links.probes import WELL_KNOWN, LinkOptions, PeerProbe, exchange_offset
from tests.unit.preflight.links.groups import Responding, host

TOKEN = b"a token"
OPTIONS = LinkOptions(connect_s=0.5, answer_s=0.5, mtu_wait_s=0.05, limits=PreflightLimits(stream_s=0.05))
HEADERS = 52  # of IPv4 and of TCP with timestamps


@contextmanager
def probe(**changed: object) -> Iterator[PeerProbe]:
    """From host 0 to a responder at host 1."""
    responder = Responding("127.0.0.2", (0, 0))
    responder.set_token(TOKEN)
    target = replace(host(1), tcp_ports=responder.tcp_ports, nonce=responder.nonce.hex())
    try:
        yield PeerProbe(replace(host(0), mtu=9000), target, (0, 1), token=TOKEN, options=OPTIONS, **changed)  # type: ignore[arg-type]
    finally:
        responder.close()


def drops(monkeypatch: pytest.MonkeyPatch, is_lost: Callable[[int], bool]) -> None:
    """What is written at once vanishes by its size, as a segment does where the MTU of a switch is too small."""
    real = Channel.send_some

    def send_some(self: Channel, data: memoryview, *, limit_s: float) -> int:
        return len(data) if is_lost(min(len(data) + HEADERS, 9000)) else real(self, data, limit_s=limit_s)

    monkeypatch.setattr(Channel, "send_some", send_some)


def test_a_healthy_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with probe() as one:
        found = one.contact()
        assert len(one.flows()) == 4
    assert (found.blocked, found.largest, found.intended, found.lost) == ((), 9000, 9000, 0)
    assert found.sent > 2
    assert found.latency_s is not None
    assert 0 < found.latency_s < 0.1


@pytest.mark.parametrize("limit", [1500, 8950, 576])
def test_the_largest_packet_that_passes_is_found(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    drops(monkeypatch, lambda size: size > limit)
    with probe() as one:
        found = one.contact()
    assert (found.largest, found.loses_large) == (limit, True)
    # Large frames that vanish are no random loss.
    assert (found.sent, found.lost) == (0, 0)


def test_what_lies_between_known_sizes_is_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(WELL_KNOWN) == list(WELL_KNOWN)
    drops(monkeypatch, lambda size: size > 8917)
    with probe() as one:
        assert one.contact().largest == 8896


def test_nothing_that_arrives_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    drops(monkeypatch, lambda size: True)
    with probe() as one:
        assert one.contact().largest is None
        # The first stream says it all.
        assert [flow.gbps for flow in one.flows()] == [0.0] * 4


def test_a_connection_is_tried_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    real = probes.connect

    def connect(address: str, port: int, *, limit_s: float, source: str = "") -> Channel:
        tries.append(limit_s)
        if len(tries) % 3:
            raise ChannelError("no answer")
        return real(address, port, limit_s=limit_s, source=source)

    monkeypatch.setattr(probes, "connect", connect)
    with probe() as one:
        one.target = replace(one.target, tcp_ports=one.target.tcp_ports[:1])
        assert one.contact().blocked == ()
    assert tries[:3] == pytest.approx([0.15, 0.15, 0.5])


def test_a_port_that_stays_silent_is_blocked() -> None:
    with socket.create_server(("127.0.0.2", 0)) as silent, probe() as one:
        port = silent.getsockname()[1]
        one.target = replace(one.target, tcp_ports=(port, *one.target.tcp_ports))
        found = one.contact()
    assert isinstance(found, Contact)
    assert [number for number, _ in found.blocked] == [port]
    assert found.largest == 9000


def test_an_exchange_does_not_count_the_way() -> None:
    assert exchange_offset(asked=100.0, received=120.5, answered=120.6, heard=101.1) == 20.0
