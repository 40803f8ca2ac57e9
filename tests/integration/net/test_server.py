import errno
import hmac
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.net.channel import Channel, ChannelError, Handshake, Secret, connect
from elastictrain.net.server import ChannelServer, PendingConnections, PendingLimits

HANDSHAKE = Handshake(magic=b"who?", nonce_bytes=4)
SECRET = Secret(b"open sesame")


def receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (data := connection.recv(count - len(received))):
        received += data
    return received


def proof_for(connection: socket.socket, *, token: bytes = SECRET.token) -> bytes:
    """What a client answers to the greeting."""
    theirs, ours = receive(connection, 8), b"who?" + b"1234"
    return ours + hmac.digest(token, b"client" + theirs[4:] + ours[4:], "sha256")


class Door:
    """A server on loopback that greets whoever it lets in."""

    def __init__(self, limits: PendingLimits, *, has_secret: bool) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.place = listener.getsockname()
        self.num_served = 0
        self.server = ChannelServer([listener], handshake=HANDSHAKE, serve=self._serve, place_s=2.0, limits=limits, name="door")
        if has_secret:
            self.server.set_secret(SECRET)
        self.server.start()

    def _serve(self, channel: Channel) -> None:
        self.num_served += 1
        channel.send(b"!", limit_s=1.0)

    def dial(self, *, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(self.place, timeout=5.0, source_address=(source, 0))

    def lets_in(self, token: bytes = SECRET.token, *, source: str = "127.0.0.1") -> bool:
        try:
            with self.dial(source=source) as connection:
                channel = Channel(connection)
                HANDSHAKE.introduce(channel, Secret(token), limit_s=5.0)
                return channel.receive(1, limit_s=5.0) == b"!"
        except (ChannelError, OSError):
            return False


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def door(limits: PendingLimits | None = None, *, has_secret: bool = True) -> Iterator[Door]:
    found = Door(limits or PendingLimits(), has_secret=has_secret)
    try:
        yield found
    finally:
        assert found.server.close()


def hangs_up(connection: socket.socket, *, within_s: float = 5.0) -> bool:
    connection.settimeout(within_s)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_who_proves_itself_is_let_in_and_nobody_else() -> None:
    with door() as found:
        assert found.lets_in()
        assert not found.lets_in(b"open barley")
        with found.dial() as connection:
            connection.sendall(bytes(100_000))
            assert hangs_up(connection)
        assert found.lets_in()
        assert found.num_served == 2


def test_a_proof_may_come_in_pieces_and_what_follows_it_is_left_alone() -> None:
    with door() as found, found.dial() as connection:
        for byte in proof_for(connection):
            connection.sendall(bytes([byte]))
            time.sleep(0.001)
        assert receive(connection, 33)[-1:] == b"!"


def test_who_is_silent_or_too_slow_is_hung_up_on() -> None:
    with door(PendingLimits(handshake_s=0.1)) as found, found.dial() as silent, found.dial() as slow:
        began = time.monotonic()
        slow.sendall(proof_for(slow)[:5])
        assert hangs_up(silent)
        assert hangs_up(slow)
        assert 0.1 <= time.monotonic() - began < 2.0


def test_a_proof_is_kept_until_there_is_a_secret() -> None:
    with door(has_secret=False) as found:
        timer = threading.Timer(0.05, found.server.set_secret, [SECRET])
        timer.start()
        assert found.lets_in()
        timer.join()


def test_without_a_secret_nobody_is_let_in() -> None:
    with door(PendingLimits(handshake_s=0.1), has_secret=False) as found:
        assert not found.lets_in()


def test_another_secret_ends_connections_under_the_old_one() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    server = ChannelServer([listener], handshake=HANDSHAKE, serve=echo, place_s=2.0, name="door")
    server.set_secret(SECRET)
    server.start()
    with connect(*place, limit_s=5.0) as channel:
        HANDSHAKE.introduce(channel, SECRET, limit_s=5.0)
        server.set_secret(SECRET)
        channel.send(b"x", limit_s=1.0)
        assert channel.receive(1, limit_s=5.0) == b"x"
        server.set_secret(Secret(b"of the next one"))
        with pytest.raises(ChannelError):
            channel.receive(1, limit_s=5.0)
    assert server.close()


def echo(channel: Channel) -> None:
    while True:
        channel.send(channel.receive(1, limit_s=5.0), limit_s=1.0)


def test_strangers_of_one_address_harm_themselves_alone() -> None:
    """A friend of another address that is slow keeps its place, whoever comes."""
    with door(PendingLimits(handshake_s=60.0, most=8, most_per_address=4)) as found, ExitStack() as stack:
        friend = stack.enter_context(found.dial(source="127.0.0.2"))
        friend.settimeout(5.0)
        proof = proof_for(friend)
        strangers = [stack.enter_context(found.dial()) for _ in range(40)]
        assert all(hangs_up(one) for one in strangers[:36])
        friend.sendall(proof)
        assert receive(friend, 33)[-1:] == b"!"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4096, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_2000_half_open_connections_keep_no_friend_out(source: str) -> None:
    """Strangers hold 2,000 from one address and go on making new ones; `source` is the address of the friends."""
    held: deque[socket.socket] = deque()
    done = threading.Event()

    def dial_again_and_again() -> None:
        while not done.wait(0.001):
            held.append(found.dial())
            held.popleft().close()

    with door() as found:
        for _ in range(2000):
            held.append(found.dial())
        stranger = threading.Thread(target=dial_again_and_again)
        stranger.start()
        try:
            through = sum(found.lets_in(source=source) for _ in range(100))
        finally:
            done.set()
            stranger.join()
            for one in held:
                one.close()
    assert through >= 95


def test_where_there_is_no_descriptor_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, refusals = socket.socket.accept, iter([OSError(errno.EMFILE, "Too many open files")])

    def full(self: socket.socket) -> object:
        for error in refusals:
            raise error
        return accept(self)

    with door(PendingLimits(handshake_s=60.0)) as found, found.dial() as stranger:
        assert receive(stranger, 4) == b"who?"
        monkeypatch.setattr(socket.socket, "accept", full)
        assert found.lets_in()
        assert hangs_up(stranger)


def test_close_hangs_up_on_strangers_and_leaves_nothing_open() -> None:
    before = num_descriptors()
    with door() as found:
        strangers = [found.dial() for _ in range(5)]
        assert receive(strangers[-1], 4) == b"who?"
    assert all(hangs_up(one) for one in strangers)
    for one in strangers:
        one.close()
    assert not found.lets_in()
    assert num_descriptors() == before


LIMITS = PendingLimits(handshake_s=2.0, most=4, most_per_address=3)


def pending(*addresses: str) -> PendingConnections[int]:
    """Connections 0, 1, 2, ... from these addresses, a second apart."""
    found: PendingConnections[int] = PendingConnections(LIMITS)
    for number, address in enumerate(addresses):
        assert found.add(number, address=address, now_s=float(number)) is None
    return found


def test_the_oldest_of_an_address_goes_where_that_address_has_too_many() -> None:
    assert pending("a", "b", "b", "b").add(9, address="b", now_s=4.0) == 1


def test_where_there_are_too_many_the_address_that_has_the_most_loses_its_oldest() -> None:
    assert pending("a", "b", "a", "b").add(9, address="b", now_s=4.0) == 1
    assert pending("friend", "b", "b", "b").add(9, address="c", now_s=4.0) == 1


def test_among_equals_the_oldest_goes() -> None:
    assert pending("a", "b", "c", "d").add(9, address="e", now_s=4.0) == 0


def test_who_is_let_in_or_gone_makes_room() -> None:
    found = pending("a", "a", "b", "b")
    found.remove(1)
    found.remove(1)
    assert found.add(9, address="a", now_s=4.0) is None
    assert len(found) == 4


def test_whose_time_is_over_goes() -> None:
    found = pending("a", "b", "c")
    assert found.take_overdue(now_s=2.0) == []
    assert found.take_overdue(now_s=3.5) == [0, 1]
    assert found.take_overdue(now_s=3.5) == []
    assert found.give_up_oldest() == 2
    assert found.give_up_oldest() is None


@given(st.lists(st.sampled_from("abcdef"), max_size=60))
def test_the_newest_is_always_taken_in_and_there_are_never_too_many(addresses: list[str]) -> None:
    found: PendingConnections[int] = PendingConnections(LIMITS)
    there: dict[int, str] = {}
    for number, address in enumerate(addresses):
        there[number] = address
        given_up = found.add(number, address=address, now_s=float(number))
        assert given_up != number
        if given_up is not None:
            del there[given_up]
        assert len(found) == len(there) <= LIMITS.most
        assert list(there.values()).count(address) <= LIMITS.most_per_address
