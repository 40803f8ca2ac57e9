import errno
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastictrain.net.handshakes import HandshakeListener
from elastictrain.net.pending import PendingLimits

PROOF = b"open sesame"


def hear(connection: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count and (data := connection.recv(count - len(heard))):
        heard += data
    return heard


class Words:
    """A handshake of two words."""

    greeting = b"who?"
    num_bytes = len(PROOF)

    def answer(self, heard: bytes) -> bytes | None:
        return b"yes" if heard == PROOF else None


class Door:
    """A listener on loopback that echoes one message of whoever it lets in."""

    def __init__(self, limits: PendingLimits, is_ready: Callable[[], bool]) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.place = listener.getsockname()
        self.addresses: list[str] = []
        self.door = HandshakeListener(
            [listener], handshake=Words, on_admitted=self._admit, is_ready=is_ready, limits=limits, name="door"
        )
        self.door.start()

    def _admit(self, connection: socket.socket, address: str, _: Words) -> None:
        self.addresses.append(address)
        connection.sendall(b"!")
        connection.close()

    def dial(self, *, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(self.place, timeout=5.0, source_address=(source, 0))

    def lets_in(self, proof: bytes = PROOF, *, source: str = "127.0.0.1", within_s: float = 5.0) -> bool:
        try:
            with self.dial(source=source) as connection:
                connection.settimeout(within_s)
                assert hear(connection, 4) in (b"who?", b"")
                connection.sendall(proof)
                return hear(connection, 4) == b"yes!"
        except OSError:
            return False


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def door(limits: PendingLimits | None = None, *, is_ready: Callable[[], bool] = lambda: True) -> Iterator[Door]:
    found = Door(limits or PendingLimits(), is_ready)
    try:
        yield found
    finally:
        assert found.door.close()


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
        assert not found.lets_in(bytes(100_000))
        assert found.lets_in()
    assert found.addresses == ["127.0.0.1"] * 2


def test_a_proof_may_come_in_pieces_and_what_follows_it_is_left_alone() -> None:
    with door() as found, found.dial() as connection:
        for byte in PROOF:
            connection.sendall(bytes([byte]))
            time.sleep(0.001)
        assert hear(connection, 8) == b"who?yes!"


def test_who_is_silent_or_too_slow_is_hung_up_on() -> None:
    with door(PendingLimits(handshake_s=0.1)) as found, found.dial() as silent, found.dial() as slow:
        began = time.monotonic()
        slow.sendall(PROOF[:5])
        assert hangs_up(silent)
        assert hangs_up(slow)
        assert 0.1 <= time.monotonic() - began < 2.0


def test_a_proof_is_kept_until_it_can_be_judged() -> None:
    ready = threading.Event()
    with door(is_ready=ready.is_set) as found:
        timer = threading.Timer(0.05, lambda: (ready.set(), found.door.wake()))
        timer.start()
        assert found.lets_in()
        timer.join()


def test_a_proof_that_cannot_be_judged_in_time_ends() -> None:
    with door(PendingLimits(handshake_s=0.1), is_ready=lambda: False) as found:
        assert not found.lets_in()


def test_strangers_of_one_address_harm_themselves_alone() -> None:
    """A friend of another address that is slow keeps its place, whoever comes."""
    with door(PendingLimits(handshake_s=60.0, most=8, most_per_address=4)) as found, ExitStack() as stack:
        friend = stack.enter_context(found.dial(source="127.0.0.2"))
        friend.settimeout(5.0)
        assert hear(friend, 4) == b"who?"
        strangers = [stack.enter_context(found.dial()) for _ in range(40)]
        assert all(hangs_up(one) for one in strangers[:36])
        friend.sendall(PROOF)
        assert hear(friend, 4) == b"yes!"


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

    def knock() -> None:
        while not done.wait(0.001):
            held.append(found.dial())
            held.popleft().close()

    with door() as found:
        for _ in range(2000):
            held.append(found.dial())
        stranger = threading.Thread(target=knock)
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
        assert hear(stranger, 4) == b"who?"
        monkeypatch.setattr(socket.socket, "accept", full)
        assert found.lets_in()
        assert hangs_up(stranger)


def test_close_hangs_up_on_strangers_and_leaves_nothing_open() -> None:
    before = num_descriptors()
    with door() as found:
        strangers = [found.dial() for _ in range(5)]
        assert hear(strangers[-1], 4) == b"who?"
    assert all(hangs_up(one) for one in strangers)
    for one in strangers:
        one.close()
    assert not found.lets_in()
    assert num_descriptors() == before
