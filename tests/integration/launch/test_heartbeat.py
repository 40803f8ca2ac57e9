import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from elastictrain.launch.heartbeat import HeartbeatDatagram, HeartbeatMesh, seal, unseal
from elastictrain.launch.membership.records import EndKind, Generation, GenerationMember, HostRecord
from tests.unit.launch.membership.made import end, generation, record

TOKEN = b"t" * 32
LOST_S = 0.08
LIMIT_S = 10.0


class Clock:
    """Stands still but for `pass_s`, which waits after each step for whoever asks it to have looked around."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.asked: Counter[str] = Counter()

    def face(self, host: str) -> Callable[[], float]:
        """The clock, as one watch asks it."""

        def ask() -> float:
            self.asked[host] += 1
            return self.now_s

        return ask

    def pass_s(self, seconds: float, *, step_s: float = LOST_S / 4) -> None:
        for _ in range(round(seconds / step_s)):
            self.jump(step_s)

    def jump(self, seconds: float) -> None:
        self.now_s += seconds
        # A pass asks two or three times.
        enough = {host: self.asked[host] + 6 for host in self.asked}
        eventually(lambda: all(self.asked[host] >= times for host, times in enough.items()))


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass(frozen=True)
class Said:
    """What a launcher says to each of the others."""

    host: str
    generation: int
    ended: bool


class Peer:
    """Another launcher's socket, in the hands of a test."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(LIMIT_S)
        self.sent = 0
        self.member = GenerationMember(host, host, "127.0.0.1", self.socket.getsockname()[1], 1)

    def hear(self) -> Said | None:
        datagram = unseal(self.socket.recv(4096), token=TOKEN)
        assert datagram is None or datagram.to == self.host
        return None if datagram is None else Said(datagram.host, datagram.generation, datagram.ended)

    def hears_nothing(self) -> bool:
        self.socket.settimeout(0.05)
        try:
            self.socket.recv(4096)
        except TimeoutError:
            return True
        return False

    def print_line(self, heartbeat: HeartbeatMesh, generation: int, *, ended: bool = False, to: str = "") -> bytes:
        """To the host of `heartbeat`; returns the datagram."""
        self.sent += 1
        data = seal(HeartbeatDatagram(self.host, to or heartbeat.host, self.sent, generation, ended), token=TOKEN)
        self.send(heartbeat, data)
        return data

    def send(self, heartbeat: HeartbeatMesh, data: bytes) -> None:
        self.socket.sendto(data, ("127.0.0.1", heartbeat.port))


@contextmanager
def watching(host: str, clock: Clock) -> Iterator[HeartbeatMesh]:
    heartbeat = HeartbeatMesh(host, token=TOKEN, lost_s=LOST_S, clock=clock.face(host))
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.close()
        del clock.asked[host]


@contextmanager
def peers(hosts: str) -> Iterator[list[Peer]]:
    found = [Peer(host) for host in hosts]
    try:
        yield found
    finally:
        for peer in found:
            peer.socket.close()


def group(number: int, *members: GenerationMember) -> Generation:
    return replace(generation(number, "z"), members=members)


def of(heartbeat: HeartbeatMesh, host: str, *, address: str = "127.0.0.1") -> GenerationMember:
    return GenerationMember(host, host, address, heartbeat.port, 1)


def line(peer: Peer) -> HostRecord:
    return replace(record(peer.host), address="127.0.0.1", watch_port=peer.member.watch_port)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))],
)
def test_two_hosts_hear_each_other_until_one_is_gone(address: str) -> None:
    clock = Clock()
    with watching("a", clock) as a:
        with watching("b", clock) as b:
            both = group(1, of(a, "a", address=address), of(b, "b", address=address))
            a.follow(both)
            b.follow(both)
            for _ in range(10):
                clock.pass_s(LOST_S / 2)
                assert (a.silent, b.silent) == (frozenset(), frozenset())
        clock.pass_s(2 * LOST_S)
        assert a.silent == {"b"}


def test_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = -1, *more: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError("Address family not supported by protocol")
        return real(family, *more)

    monkeypatch.setattr("elastictrain.launch.heartbeat.socket.socket", without_ipv6)
    heartbeat = HeartbeatMesh("a", token=TOKEN, lost_s=LOST_S)
    monkeypatch.undo()
    heartbeat.start()
    try:
        with peers("b") as (b,):
            heartbeat.follow(group(3, of(heartbeat, "a"), b.member))
            eventually(lambda: b.hear() == Said("a", 3, ended=False))
    finally:
        heartbeat.close()


def test_every_host_speaks_to_all_members_and_misses_each_of_them() -> None:
    clock = Clock()
    with watching("b", clock) as heartbeat, peers("ac") as (a, c):
        heartbeat.follow(group(5, a.member, of(heartbeat, "b"), c.member))
        clock.jump(LOST_S / 4)
        assert a.hear() == c.hear() == Said("b", 5, ended=False)
        for _ in range(8):
            a.print_line(heartbeat, 5)
            clock.pass_s(LOST_S / 4)
        assert heartbeat.silent == {"c"}


def test_a_host_that_waits_speaks_to_those_that_it_is_told_of() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("bc") as (b, c):
        heartbeat.send_to([line(b), line(c)])
        # At once, not with the next beat: the clock stands still.
        assert b.hear() == c.hear() == Said("a", 0, ended=False)
        heartbeat.send_to([line(b)])
        while not c.hears_nothing():
            pass
        clock.jump(LOST_S / 4)
        assert b.hear() == Said("a", 0, ended=False)
        assert c.hears_nothing()
        assert heartbeat.silent == frozenset()


def test_a_host_that_speaks_is_answered_at_once_wherever_it_is_and_only_while_it_speaks() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        b.print_line(heartbeat, 0)
        assert b.hear() == Said("a", 0, ended=False)
        clock.pass_s(2 * LOST_S)
        while not b.hears_nothing():
            pass
        clock.jump(LOST_S / 4)
        assert b.hears_nothing()


def test_who_is_heard_is_known_with_the_time_since_when_member_or_not() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("bz") as (b, z):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member))
        assert heartbeat.heard[0] == frozenset()
        b.print_line(heartbeat, 1)
        eventually(lambda: heartbeat.heard == ({"b"}, clock.now_s))
        clock.jump(LOST_S / 4)
        # In this order: once `z` is heard, this word of `b` is heard, too.
        b.print_line(heartbeat, 1)
        z.print_line(heartbeat, 1)
        eventually(lambda: heartbeat.heard == ({"b", "z"}, clock.now_s))
        # A new group changes nothing about who gets through.
        heartbeat.follow(group(2, of(heartbeat, "a"), z.member))
        assert heartbeat.heard[0] == {"b", "z"}
        clock.pass_s(LOST_S / 4)
        z.print_line(heartbeat, 1)
        clock.pass_s(LOST_S / 2)
        eventually(lambda: heartbeat.heard[0] == {"z"})
        assert heartbeat.silent == frozenset()
        clock.pass_s(LOST_S)
        assert heartbeat.heard[0] == frozenset()
        assert heartbeat.silent == {"z"}


def test_what_a_group_without_this_host_says_for_ever_is_news_for_a_while() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(7, of(heartbeat, "a"), b.member))
        told = []
        for _ in range(12):
            b.print_line(heartbeat, 8)
            clock.jump(LOST_S / 4)
            told.append(heartbeat.pop_received()[0])
        assert told[0]
        assert not any(told[-4:])
        b.print_line(heartbeat, 9)
        clock.jump(LOST_S / 4)
        assert heartbeat.pop_received()[0]


def test_nobody_hears_himself() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("a") as (echo,):
        echo.print_line(heartbeat, 1)
        clock.jump(LOST_S / 4)
        assert heartbeat.heard[0] == frozenset()


def test_a_sign_of_life_counts_for_the_host_that_gives_it() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("bcz") as (b, c, z):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member, c.member))
        for _ in range(8):
            b.print_line(heartbeat, 1)
            z.print_line(heartbeat, 1)
            clock.pass_s(LOST_S / 4)
        assert heartbeat.silent == {"c"}
        c.print_line(heartbeat, 1)
        eventually(lambda: heartbeat.silent == frozenset())


def test_a_host_that_is_a_generation_behind_lives() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(4, of(heartbeat, "a"), b.member))
        for _ in range(8):
            b.print_line(heartbeat, 3, ended=True)
            clock.pass_s(LOST_S / 4)
        assert heartbeat.silent == frozenset()
        assert not heartbeat.pop_received()[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\0" * 200,
        b"\xff" * 9000,
        seal(HeartbeatDatagram("b", "a", 99, 9, ended=True), token=b"u" * 32),
        seal(HeartbeatDatagram("b", "a", 99, 9, ended=True), token=TOKEN)[:-1],
    ],
    ids=["empty", "one byte", "zeros", "too large", "of another run", "cut"],
)
def test_what_is_no_word_is_not_heard_and_does_no_harm(data: bytes) -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member))
        for _ in range(8):
            b.send(heartbeat, data)
            clock.pass_s(LOST_S / 4)
        assert heartbeat.silent == {"b"}
        assert not heartbeat.pop_received()[0]
        b.print_line(heartbeat, 1)
        eventually(lambda: heartbeat.silent == frozenset())


def test_what_was_sent_before_is_dropped_and_counted() -> None:
    """Somebody who listens on the way sends it again, from another address."""
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("bz") as (b, z):
        heartbeat.follow(group(7, of(heartbeat, "a"), b.member))
        old = [b.print_line(heartbeat, 8, ended=ended) for ended in (False, True)]
        eventually(lambda: heartbeat.heard[0] == {"b"})
        clock.jump(LOST_S / 4)
        heartbeat.pop_received()[0]
        for _ in range(8):
            for data in old:
                z.send(heartbeat, data)
            clock.pass_s(LOST_S / 4)
        assert (heartbeat.silent, heartbeat.heard[0]) == ({"b"}, frozenset())
        assert z.hears_nothing()
        assert not heartbeat.pop_received()[0]
        b.print_line(heartbeat, 7)
        eventually(lambda: heartbeat.silent == frozenset())


def test_what_was_meant_for_another_start_of_a_launcher_is_dropped() -> None:
    """It has heard nothing yet, so that no counter is too small for it."""
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member))
        for _ in range(8):
            b.print_line(heartbeat, 2, to="a, before it was started again")
            clock.pass_s(LOST_S / 4)
        assert heartbeat.silent == {"b"}
        assert not heartbeat.pop_received()[0]


@pytest.mark.parametrize(
    ("address", "port"),
    [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("", 9), ("a..b", 9), ("a\0b", 9), ("256.1.1.1", 9), ("x" * 300, 9)],
)
def test_a_member_that_cannot_be_reached_does_not_keep_the_others_from_being_told(address: str, port: int) -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("c") as (c,):
        heartbeat.follow(group(1, of(heartbeat, "a"), GenerationMember("b", "b", address, port, 1), c.member))
        clock.jump(LOST_S / 4)
        clock.jump(LOST_S / 4)
        assert c.hear() == Said("a", 1, ended=False)
        c.print_line(heartbeat, 1)
        heartbeat.send_end(record("a"))
        eventually(lambda: c.hear() == Said("a", 1, ended=True))


@pytest.mark.parametrize(
    ("number", "ended", "news"),
    [(7, True, 7), (8, False, 8), (8, True, 8), (7, False, 0), (6, True, 0), (6, False, 0)],
)
def test_news(number: int, ended: bool, news: int) -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(7, of(heartbeat, "a"), b.member))
        b.print_line(heartbeat, number, ended=ended)
        clock.jump(LOST_S / 4)
        assert heartbeat.pop_received()[0] == news
        assert not heartbeat.pop_received()[0]


def test_an_end_that_this_host_has_told_itself_is_no_news_but_a_newer_generation_is() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(7, of(heartbeat, "a"), b.member))
        heartbeat.send_end(record("a"))
        b.print_line(heartbeat, 7, ended=True)
        clock.jump(LOST_S / 4)
        assert not heartbeat.pop_received()[0]
        b.print_line(heartbeat, 8)
        clock.jump(LOST_S / 4)
        assert heartbeat.pop_received()[0]


def test_an_end_is_told_at_once_and_again_and_again() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(7, of(heartbeat, "a"), b.member))
        clock.jump(LOST_S / 4)
        heartbeat.send_end(record("a"))
        # The clock stands still: what comes now is not one of those that are due now and then.
        eventually(lambda: b.hear() == Said("a", 7, ended=True))
        clock.jump(LOST_S / 4)
        assert b.hear() == Said("a", 7, ended=True)
        heartbeat.follow(group(8, of(heartbeat, "a"), b.member))
        clock.jump(LOST_S / 4)
        eventually(lambda: b.hear() == Said("a", 8, ended=False))


def test_what_a_host_says_of_its_end_is_there_before_storage_shows_it() -> None:
    clock = Clock()
    told = replace(record("b", ended=7), end=end("b", EndKind.FAILED, 70, number=7), writers=("some",))
    with watching("a", clock) as a, watching("b", clock) as b:
        a.follow(group(7, of(a, "a"), of(b, "b")))
        b.follow(group(7, of(a, "a"), of(b, "b")))
        b.send_end(told)
        heard: list[HostRecord] = []
        news: set[int] = set()

        def hears() -> bool:
            number, records = a.pop_received()
            news.add(number)
            heard.extend(records)
            return bool(heard)

        eventually(hears)
        assert heard[0] == replace(told, hears=(), writers=())
        assert max(news) == 7
        # It is said again: datagrams are lost.
        heard.clear()
        clock.pass_s(LOST_S)
        assert hears()
        b.follow(group(8, of(a, "a"), of(b, "b")))
        clock.pass_s(LOST_S)
        a.pop_received()
        clock.pass_s(LOST_S)
        assert a.pop_received()[1] == []


def test_who_was_frozen_accuses_nobody_until_they_have_had_their_time() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member))
        clock.jump(100 * LOST_S)
        assert heartbeat.silent == frozenset()
        clock.pass_s(LOST_S * 3 / 4)
        assert heartbeat.silent == frozenset()
        clock.pass_s(LOST_S / 2)
        assert heartbeat.silent == {"b"}


def test_a_new_group_has_its_time() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("bc") as (b, c):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member))
        clock.pass_s(2 * LOST_S)
        assert heartbeat.silent == {"b"}
        heartbeat.follow(group(2, of(heartbeat, "a"), c.member))
        assert heartbeat.silent == frozenset()
        clock.pass_s(2 * LOST_S)
        assert heartbeat.silent == {"c"}


def test_before_it_takes_part_it_hears_and_says_nothing() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat:
        clock.pass_s(2 * LOST_S)
        assert heartbeat.silent == frozenset()
        assert not heartbeat.pop_received()[0]


def test_close_falls_silent() -> None:
    clock = Clock()
    with watching("a", clock) as heartbeat, peers("b") as (b,):
        heartbeat.follow(group(1, of(heartbeat, "a"), b.member))
        clock.jump(LOST_S / 4)
        assert b.hear() is not None
        heartbeat.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
        while not b.hears_nothing():
            pass
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("", heartbeat.port))
