import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.checkpoint.peers.wire import Channel, WireError
from elastictrain.config.roster_address import RosterAddress
from elastictrain.errors import ConfigError, PermanentStorageError, StorageError, TransientStorageError
from elastictrain.launch.membership.codec import encode
from elastictrain.launch.membership.records import EndKind, HostState, Outcome
from elastictrain.launch.membership.registry import Registry
from elastictrain.launch.membership.tcp_frames import Frames, Message, begin_as_client
from elastictrain.launch.membership.tcp_server import RosterServer, ServerLimits
from elastictrain.launch.roster import Roster
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.unit.checkpoint.fakes import FakeStore, nothing
from tests.unit.launch.membership.made import end, entry, generation
from tests.unit.launch.membership.served import TOKEN, connected, free_address, served

LIMIT_S = 10.0
KEY = "launch/hosts/a.json"


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


@contextmanager
def called(server: RosterServer) -> Iterator[socket.socket]:
    """A connection of somebody who may say anything."""
    with socket.create_connection((server._address.host, server._address.port), timeout=LIMIT_S) as connection:
        yield connection


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it has said before."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def still_serves(server: RosterServer) -> bool:
    with connected(server) as roster:
        Registry(roster).write_entry(entry("z"))
        return "z" in {line.host for line in Registry(roster).entries()}


def test_of_concurrent_creators_one_wins(store: Store) -> None:
    hosts = "abcdefgh"
    with served(store) as server, ThreadPoolExecutor(len(hosts)) as threads:
        barrier = threading.Barrier(len(hosts))

        def propose(host: str) -> list[bool]:
            with connected(server) as roster:
                registry, won = Registry(roster), []
                for number in (1, 2, 3):
                    barrier.wait(LIMIT_S)
                    won.append(registry.create(generation(number, host)))
                assert registry.newest() == Registry(store).newest()
                return won

        rows = list(threads.map(propose, hosts))
    assert [sum(column) for column in zip(*rows, strict=True)] == [1, 1, 1]


def test_two_servers_over_one_storage_make_one_generation(store: Store) -> None:
    with served(store) as first, served(store) as second, connected(first) as one, connected(second) as other:
        assert Registry(one).create(generation(1, "a"))
        registry = Registry(other)
        assert registry.newest() is None
        assert not registry.create(generation(1, "b"))
        assert registry.newest() == generation(1, "a")


def test_a_server_that_starts_again_goes_on_counting(store: Store) -> None:
    address = free_address()
    with connected(address) as roster:
        registry = Registry(roster)
        with served(store, address):
            registry.write_entry(entry("a", HostState.BUSY))
            for number in (1, 2):
                assert registry.create(generation(number, "ab"))
            registry.write_end(end("b", EndKind.LEAVING, number=2))
        with pytest.raises(
            TransientStorageError, match=f"tcp://127.0.0.1:{address.port} cannot be reached: Connection refused"
        ):
            registry.newest()
        with served(store, address) as server, connected(server) as late:
            # The one that was there before goes on, on a new connection; the one that comes now knows as much.
            for each in (registry, Registry(late)):
                assert each.newest() == generation(2, "ab")
                assert each.ends(2) == {"b": end("b", EndKind.LEAVING, number=2)}
                assert each.follows_another(2)
            assert not Registry(late).create(generation(1, "z"))
            assert not Registry(late).create(generation(2, "z"))
            # Lines say who lives now: each host writes its own again.
            assert registry.entries() == []
            registry.write_entry(replace(entry("a", HostState.BUSY), beat=2))
            assert Registry(late).entries() == [replace(entry("a", HostState.BUSY), beat=2)]
            assert registry.create(generation(3, "a", outcome=Outcome.DONE))
    assert Registry(store).newest() == generation(3, "a", outcome=Outcome.DONE)


def test_lines_and_nothing_else_stay_out_of_storage() -> None:
    store = FakeStore()
    with served(store) as server, connected(server) as roster:
        registry = Registry(roster)
        registry.write_entry(entry("a"))
        registry.create(generation(1, "a"))
        registry.write_end(end("a", EndKind.DONE))
        assert registry.entries() == [entry("a")]
    assert sorted(store.objects) == ["launch/ends/000000001/a.json", "launch/generations/000000001.json"]


def test_all_lines_are_one_request(store: Store) -> None:
    with served(store) as server, connected(server) as roster:
        registry = Registry(roster)
        lines = [entry(f"host-{number:03d}") for number in range(200)]
        for line in lines:
            registry.write_entry(line)
        asked: list[str] = []
        ask = roster._ask
        roster._ask = lambda what, key, data=b"": asked.append(what) or ask(what, key, data)  # type: ignore[method-assign, func-returns-value]
        assert registry.entries() == lines
        assert asked == ["list"]
        # What a list brought along is not given out a second time, nor once it was replaced.
        list(roster.list("launch/hosts"))
        registry.write_entry(replace(lines[0], beat=9))
        assert roster.read("launch/hosts/host-000.json") == encode(replace(lines[0], beat=9))
        assert roster.read("launch/hosts/host-001.json") == roster.read("launch/hosts/host-001.json") == encode(lines[1])
        assert asked == ["list", "list", "write", "read", "read"]


@pytest.mark.parametrize(
    "key", ["launch/token", "checkpoints/step-1/manifest.json", "launch/hosts/../token", "launch/hosts/", ""]
)
def test_what_is_not_its_business_is_refused(key: str) -> None:
    store = FakeStore({"launch/token": TOKEN})
    with served(store) as server, connected(server) as roster:
        for act in (lambda: roster.write(key, b"x"), lambda: roster.create(key, b"x"), lambda: roster.delete(key)):
            with pytest.raises(PermanentStorageError, match="does not belong into"):
                act()
        with pytest.raises(StorageError, match="does not exist"):
            roster.read(key)
        assert list(roster.list("")) == []
    assert store.objects == {"launch/token": TOKEN}


def test_garbage_ends_its_own_connection_only(store: Store) -> None:
    pieces = [b"", b"\0" * 3, b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 4096, b"ETROST01" + b"n" * 32 + b"\xff\xff\xff\xff"]
    with served(store) as server:
        for piece in pieces:
            with called(server) as connection:
                with suppress(OSError):
                    # It may have hung up before it has read all of this.
                    connection.sendall(piece)
                    connection.shutdown(socket.SHUT_WR)
                assert hung_up(connection)
        assert still_serves(server)
        eventually(lambda: not server._channels)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"do": "write"},
        {"do": "write", "key": 7},
        {"do": "burn", "key": KEY},
        {"do": ["write"], "key": KEY},
        {"do": "list", "key": None},
    ],
)
def test_signed_nonsense_ends_its_own_connection_only(store: Store, header: dict[str, str]) -> None:
    with served(store) as server:
        with called(server) as connection:
            frames = begin_as_client(Channel(connection), TOKEN, limit_s=LIMIT_S)
            frames.send(Message(header, b"x"), limit_s=LIMIT_S)
            with pytest.raises(WireError, match="hung up"):
                frames.receive(most_bytes=100, limit_s=LIMIT_S)
        assert still_serves(server)


@pytest.mark.parametrize(
    "body", [b"", b"\0\0", b"\0\0\0\x02[]", b"\0\0\0\x04{{{{", b"\xff\xff\xff\xff" + b"[" * 9000], ids=range(5)
)
def test_signed_bytes_that_are_no_message_end_their_own_connection_only(store: Store, body: bytes) -> None:
    with served(store) as server:
        with called(server) as connection:
            frames = begin_as_client(Channel(connection), TOKEN, limit_s=LIMIT_S)
            connection.sendall(struct.pack(">I", len(body)) + frames._proof(b"client", 0, body) + body)
            assert hung_up(connection)
        assert still_serves(server)


def test_too_large_an_object_is_not_taken(store: Store) -> None:
    with served(store) as server, connected(server) as roster:
        with pytest.raises(TransientStorageError):
            roster.write(KEY, bytes(2 << 20))
        roster.write(KEY, bytes(1 << 20))
        assert len(roster.read(KEY)) == 1 << 20


def test_another_runs_token_is_of_no_use(store: Store) -> None:
    with served(store) as server, connected(server, token=b"o" * 32) as roster:
        with pytest.raises(TransientStorageError, match="as the roster of another run does"):
            Registry(roster).write_entry(entry("x"))
        with connected(server) as good:
            assert Registry(good).entries() == []


def recorded(server: RosterServer) -> tuple[bytes, bytes]:
    """What a launcher says when it writes a line: its first bytes, and the frame."""
    said: list[bytes] = []

    class Overheard(Channel):
        def send_raw(self, data: bytes, *, limit_s: float) -> None:
            said.append(data)
            super().send_raw(data, limit_s=limit_s)

    with called(server) as connection:
        frames = begin_as_client(Overheard(connection), TOKEN, limit_s=LIMIT_S)
        frames.send(Message({"do": "write", "key": KEY}, encode(entry("a"))), limit_s=LIMIT_S)
        frames.receive(most_bytes=1000, limit_s=LIMIT_S)
    hello, frame = said
    return hello, frame


def test_what_was_overheard_cannot_be_said_again(store: Store) -> None:
    with served(store) as server, connected(server) as roster:
        registry = Registry(roster)
        hello, frame = recorded(server)
        assert registry.entries() == [entry("a")]
        registry.forget("a")
        with called(server) as connection:
            connection.sendall(hello + frame)
            assert hung_up(connection)
        # Nor on the connection on which it was said.
        with called(server) as connection:
            frames = begin_as_client(Channel(connection), TOKEN, limit_s=LIMIT_S)
            frames.send(Message({"do": "list", "key": "launch/hosts"}), limit_s=LIMIT_S)
            frames.receive(most_bytes=1000, limit_s=LIMIT_S)
            frames._said = 0
            frames.send(Message({"do": "write", "key": KEY}, encode(entry("a"))), limit_s=LIMIT_S)
            assert hung_up(connection)
        assert registry.entries() == []


def test_an_answer_must_be_signed_as_well(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection:
                channel = Channel(connection)
                channel.send_raw(b"ETROST01" + b"n" * 32, limit_s=LIMIT_S)
                channel.receive_raw(40, limit_s=LIMIT_S)
                forged = Frames(channel, key=b"k" * 32, says=b"server", hears=b"client")
                forged.send(Message({"objects": []}), limit_s=LIMIT_S)
                hung_up(connection)

        thread = threading.Thread(target=pretend)
        thread.start()
        address = RosterAddress("127.0.0.1", listening.getsockname()[1])
        with connected(address) as roster, pytest.raises(TransientStorageError, match="not signed with the token"):
            Registry(roster).entries()
        thread.join(LIMIT_S)


def test_what_a_launcher_said_is_no_answer_to_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def send_back() -> None:
            connection, _ = listening.accept()
            with connection:
                channel = Channel(connection)
                channel.send_raw(b"ETROST01" + b"n" * 32, limit_s=LIMIT_S)
                channel.receive_raw(40, limit_s=LIMIT_S)
                head = channel.receive_raw(4, limit_s=LIMIT_S)
                rest = channel.receive_raw(32 + struct.unpack(">I", head)[0], limit_s=LIMIT_S)
                channel.send_raw(head + rest, limit_s=LIMIT_S)
                hung_up(connection)

        thread = threading.Thread(target=send_back)
        thread.start()
        address = RosterAddress("127.0.0.1", listening.getsockname()[1])
        with connected(address) as roster, pytest.raises(TransientStorageError, match="not signed with the token"):
            roster.write(KEY, b"x")
        thread.join(LIMIT_S)


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3 and more than that\r\n"])
def test_what_answers_may_be_something_else(greeting: bytes) -> None:
    """A stalled server costs a launcher no more than the limit of one request; another service is named as such."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted: list[socket.socket] = []

        def greet() -> None:
            accepted.append(listening.accept()[0])
            accepted[0].sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        address = RosterAddress("127.0.0.1", listening.getsockname()[1])
        began_s = time.monotonic()
        expected = "what answers there is no roster" if greeting else "too slow"
        with connected(address, limit_s=0.3) as roster, pytest.raises(TransientStorageError, match=expected):
            Registry(roster).entries()
        assert time.monotonic() - began_s < 3.0
        thread.join(LIMIT_S)
        accepted[0].close()


def test_the_limit_of_a_request_is_short_enough() -> None:
    """Time that the roster's thread waits for a stalled server is time in which it does not see one that is back."""
    from elastictrain.launch.membership.tcp_roster import LIMIT_S as REQUEST_S

    assert REQUEST_S <= 5.0


def test_a_server_that_stalls_in_the_middle_costs_the_limit_once() -> None:
    store = FakeStore()
    gate = threading.Event()
    with served(store) as server, connected(server, limit_s=0.4) as roster, connected(server) as other:
        registry = Registry(roster)
        registry.write_entry(entry("a"))

        def stall(operation: str, key: str) -> None:
            if operation == "create":
                gate.wait(LIMIT_S)

        store.before = stall
        began_s = time.monotonic()
        with pytest.raises(TransientStorageError, match="cannot be reached: the other side is too slow"):
            registry.create(generation(1, "a"))
        assert time.monotonic() - began_s < 3.0
        # Storage stalls; lines and ends do not go through it.
        Registry(other).write_entry(entry("b"))
        Registry(other).write_end(end("b", EndKind.FAILED))
        assert registry.entries() == [entry("a"), entry("b")]
        assert set(registry.ends(1)) == {"b"}
        assert registry.newest() is None
        gate.set()
        eventually(lambda: registry.newest() == generation(1, "a"))
        assert registry.create(generation(1, "a"))


def test_slow_clients_are_hung_up_on(store: Store) -> None:
    limits = ServerLimits(frame_s=0.3)
    with served(store, limits=limits) as server, called(server) as silent, called(server) as slow:
        slow.sendall(b"ETROST01" + b"n" * 32 + struct.pack(">I", 4000))
        began_s = time.monotonic()
        assert still_serves(server)
        for _ in range(100):
            try:
                slow.sendall(b"\0")
            except OSError:
                break
            time.sleep(0.02)
        assert hung_up(slow)
        assert hung_up(silent)
        assert time.monotonic() - began_s < LIMIT_S
        eventually(lambda: not server._channels)


def test_an_idle_connection_is_ended_and_comes_again(store: Store) -> None:
    with served(store, limits=ServerLimits(idle_s=0.05)) as server, connected(server) as roster:
        Registry(roster).write_entry(entry("a"))
        eventually(lambda: not server._channels)
        assert Registry(roster).entries() == [entry("a")]


def test_strangers_do_not_take_all_places(store: Store) -> None:
    limits = ServerLimits(strangers=2, frame_s=60.0)
    with served(store, limits=limits) as server, connected(server) as roster:
        registry = Registry(roster)
        registry.write_entry(entry("a"))
        with called(server), called(server):
            eventually(lambda: server._strangers == 2)
            with called(server) as third:
                assert hung_up(third)
            # Who is in stays in.
            assert registry.entries() == [entry("a")]
        eventually(lambda: server._strangers == 0)
        assert still_serves(server)


def test_there_is_room_for_so_many_and_no_more(store: Store) -> None:
    with served(store, limits=ServerLimits(connections=1)) as server, connected(server) as first:
        Registry(first).write_entry(entry("a"))
        with connected(server) as second, pytest.raises(TransientStorageError, match="hung up"):
            Registry(second).entries()
        first.close()
        eventually(lambda: not server._channels)
        assert still_serves(server)


def test_ipv6(store: Store) -> None:
    address = free_address("::1")
    assert str(address) == f"tcp://[::1]:{address.port}"
    with served(store, address) as server:
        assert still_serves(server)


def test_a_name_is_served_at_every_address(store: Store) -> None:
    port = free_address().port
    with served(store, RosterAddress("localhost", port)) as server:
        assert still_serves(server)
        with connected(RosterAddress("127.0.0.1", port)) as roster:
            assert [line.host for line in Registry(roster).entries()] == ["z"]


def test_a_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def refuse(*arguments: object, **named: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def stall(*arguments: object, **named: object) -> None:
        gate.wait(LIMIT_S)
        refuse()

    with connected(RosterAddress("nowhere", 29_400), limit_s=0.1) as roster:
        for resolver, said in ((refuse, "Name or service not known"), (stall, "the name nowhere is not looked up in time")):
            monkeypatch.setattr(socket, "getaddrinfo", resolver)
            with pytest.raises(TransientStorageError, match=f"tcp://nowhere:29400 cannot be reached: {said}"):
                Registry(roster).entries()
    gate.set()


def test_a_port_that_is_taken_is_waited_for(store: Store) -> None:
    address = free_address()
    with served(store, address) as second_to_none:
        late = RosterServer(address, store, token=TOKEN)
        late.start()
        try:
            time.sleep(0.05)
            assert late.objects is None
            second_to_none.close(limit_s=LIMIT_S)
            eventually(lambda: late.objects is not None)
            assert still_serves(late)
        finally:
            late.close(limit_s=LIMIT_S)


def test_an_address_of_another_host_cannot_be_served(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"`launch.roster` is tcp://192.0.2.77:29400, where this host cannot listen"):
        RosterServer(RosterAddress("192.0.2.77", 29_400), store, token=TOKEN).start()


def test_ends_reach_storage_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    with served(store) as server, connected(server) as roster, caplog.at_level(logging.WARNING):
        registry = Registry(roster)

        def fail(operation: str, key: str) -> None:
            if operation == "write":
                raise TransientStorageError("away")

        store.before = fail
        registry.write_end(end("a", EndKind.DONE))
        registry.write_end(end("b", EndKind.DONE))
        assert set(registry.ends(1)) == {"a", "b"}
        eventually(lambda: bool(caplog.records))
        store.before = nothing
    assert sorted(store.objects) == ["launch/ends/000000001/a.json", "launch/ends/000000001/b.json"]
    assert [record.getMessage() for record in caplog.records] == [
        "the roster's ends of generations cannot be saved, which is tried again: away"
    ]


def test_the_launchers_thread_survives_a_server_that_is_gone(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    address = free_address()
    with connected(address) as a, connected(address) as b, caplog.at_level(logging.WARNING):
        rosters = [Roster(Registry(one), entry(host), poll_s=0.02, lost_s=0.4) for one, host in ((a, "a"), (b, "b"))]
        with served(store, address):
            for roster in rosters:
                roster.start()
            eventually(lambda: "b" in rosters[0].known.seen and "a" in rosters[1].known.seen)
            rosters[0].post(generation(1, "ab"))
            eventually(lambda: all(roster.known.newest == generation(1, "ab") for roster in rosters))
        eventually(lambda: all(roster.known.trouble for roster in rosters))
        # An end waits for the server; a generation is proposed anew if it is still due.
        rosters[1].post(end("b", EndKind.FAILED, 70))
        rosters[0].say(HostState.BUSY)
        last_s = rosters[0].known.read_s
        time.sleep(0.1)
        assert rosters[0].known.read_s == last_s
        with served(store, address):
            eventually(lambda: set(rosters[0].known.ends) == {"b"})
            eventually(lambda: rosters[1].known.seen["a"].entry.state is HostState.BUSY)
            assert rosters[0].known.newest == generation(1, "ab")
            rosters[0].post(generation(2, "a"))
            eventually(lambda: all(roster.known.newest == generation(2, "a") for roster in rosters))
            for roster in rosters:
                roster.close(limit_s=LIMIT_S)
                assert not roster._thread.is_alive()
    messages = {record.getMessage().partition(":")[0] for record in caplog.records}
    assert messages == {"the roster cannot be reached, and is tried again"}
