import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from elastictrain.errors import HostUnfitError
from elastictrain.net.channel import Channel, ChannelError, StrangerError, connect
from elastictrain.net.server import CONNECTIONS
from elastictrain.preflight.links.responder import GIVE, HANDSHAKE, PONG, REQUEST, responder_secret, start_responder
from tests.unit.preflight.links.groups import Responding

TOKEN = b"the token"


@pytest.fixture
def responder() -> Iterator[Responding]:
    made = Responding("127.0.0.1")
    made.set_token(TOKEN)
    yield made
    made.close()


@contextmanager
def asked(responder: Responding, *, token: bytes = TOKEN, nonce: bytes | None = None) -> Iterator[Channel]:
    secret = responder_secret(token, responder.nonce if nonce is None else nonce)
    with connect("127.0.0.1", responder.tcp_ports[0], source="127.0.0.1", limit_s=1) as line:
        HANDSHAKE.introduce(line, secret, limit_s=1)
        yield line


def ping(responder: Responding) -> None:
    with asked(responder) as line:
        line.send(REQUEST.pack(b"E", 0.0) + b"\0" * 8, limit_s=1)
        came, left = PONG.unpack(line.receive(PONG.size, limit_s=1))
        assert abs(time.time() - came) < 5
        assert left >= came


def test_who_has_the_token_is_answered(responder: Responding) -> None:
    ping(responder)


def test_strangers_are_not(responder: Responding) -> None:
    with pytest.raises(ChannelError), asked(responder, token=b"another"):
        pass


def test_a_stranger_gets_nothing_whatever_it_sends_after_the_opening(responder: Responding) -> None:
    """It does not wait for a proof, and asks at once."""
    with connect("127.0.0.1", responder.tcp_ports[0], source="127.0.0.1", limit_s=1) as line:
        opening = line.receive(24, limit_s=1)
        line.send(opening[:8] + b"\0" * 48 + REQUEST.pack(GIVE, 1.0), limit_s=1)
        with pytest.raises(ChannelError, match="hung up"):
            line.receive(1, limit_s=1)


def test_a_host_that_is_not_the_one_it_should_be_is_found_out(responder: Responding) -> None:
    with pytest.raises(StrangerError), asked(responder, nonce=b"of somebody else"):
        pass


def test_something_else_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            connection, _ = other.accept()
            with connection, suppress(OSError):
                connection.sendall(b"SSH-2.0-OpenSSH_9.6 and so on and on")
                connection.recv(1)

        thread = threading.Thread(target=speak)
        thread.start()
        connection = connect("127.0.0.1", other.getsockname()[1], source="127.0.0.1", limit_s=1)
        with connection, pytest.raises(StrangerError):
            HANDSHAKE.introduce(connection, responder_secret(TOKEN, b""), limit_s=1)
        thread.join(5)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 5000])
def test_malformed_input_ends_a_connection_and_nothing_else(responder: Responding, data: bytes) -> None:
    with connect("127.0.0.1", responder.tcp_ports[0], source="127.0.0.1", limit_s=1) as connection:
        connection.send(data, limit_s=1)
    ping(responder)


@pytest.mark.parametrize("request_", [b"X", b"G", b"S"])
def test_absurd_requests_end_a_connection(responder: Responding, request_: bytes) -> None:
    for seconds in (1e9, -1.0, float("nan")):
        with asked(responder) as line:
            line.send(REQUEST.pack(request_, seconds), limit_s=1)
            with pytest.raises(ChannelError, match="hung up"):
                line.receive(1, limit_s=1)
    ping(responder)


def test_who_comes_before_the_token_waits_for_it() -> None:
    responder = Responding("127.0.0.1")
    timer = threading.Timer(0.1, responder.set_token, [TOKEN])
    timer.start()
    ping(responder)
    timer.join()
    responder.close()


def test_silent_strangers_keep_nobody_out(responder: Responding) -> None:
    with ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection(("127.0.0.1", responder.tcp_ports[0])))
        ping(responder)


def test_connections_are_bounded(responder: Responding) -> None:
    """More wait for a place, and are served when there is one."""
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        first.enter_context(asked(responder))
        for _ in range(CONNECTIONS - 1):
            stack.enter_context(asked(responder))
        with pytest.raises(ChannelError, match="no answer"):
            ping(responder)
        first.close()
        ping(responder)


def test_close_ends_everything_at_once() -> None:
    responder = Responding("127.0.0.1")
    responder.set_token(TOKEN)
    with asked(responder) as line:
        line.send(REQUEST.pack(GIVE, 9.0), limit_s=1)
        line.receive(1, limit_s=1)
        began = time.monotonic()
        responder.close()
        assert time.monotonic() - began < 1.0
        with pytest.raises(ChannelError):
            line.receive(1 << 30, limit_s=2)
    with pytest.raises(ChannelError, match="refused"):
        connect("127.0.0.1", responder.tcp_ports[0], source="127.0.0.1", limit_s=1)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostUnfitError, match=str(port)):
            start_responder("127.0.0.1", (0, port))
