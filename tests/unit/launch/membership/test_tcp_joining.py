import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from elastictrain.config.roster_address import RosterAddress
from elastictrain.errors import StopRequestedError, TransientStorageError
from elastictrain.launch.membership import tcp_joining
from elastictrain.launch.membership.records import HostState, Outcome
from elastictrain.launch.membership.registry import Registry
from elastictrain.launch.membership.serving import Site
from elastictrain.launch.membership.tcp_joining import Around, JoinedRoster
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.launch.membership.made import entry, generation
from tests.unit.launch.membership.served import TOKEN, connected, free_address, served

LIMIT_S = 10.0
OWNER = Site(("vm-1",), frozenset({"127.0.0.1"}), alone=False)
OTHER = Site(("vm-2",), frozenset({"10.0.0.2"}), alone=True)
"""Alone, so that a loopback address is allowed; with another one it would not serve."""


@dataclass
class Terminal:
    """What was said, and a clock that only sleeps make go."""

    said: list[str] = field(default_factory=list)
    now_s: float = 100.0
    on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


def around(terminal: Terminal, site: Site = OWNER, *, store: FakeStore | None = None, stop: bool = False) -> Around:
    # The connection measures its limits with the real clock.
    return Around(
        store or FakeStore(),
        TOKEN,
        site,
        asked_to_stop=lambda: stop,
        say=terminal.said.append,
        clock=lambda: terminal.now_s,
        sleep=terminal.sleep,
    )


def not_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_joining, "serves", lambda *arguments: False)


def test_the_host_that_has_the_address_serves_it_before_it_joins() -> None:
    terminal, store, address = Terminal(), FakeStore(), free_address()
    joined = JoinedRoster(address, around(terminal, store=store))
    joined.join(wait_s=5.0)
    try:
        Registry(joined.objects).create(generation(1, "a"))
        with connected(address) as roster:
            assert Registry(roster).newest() == generation(1, "a")
    finally:
        joined.close(host="a", quiet_s=8.0)
    assert terminal.said == [f"this host serves the roster at {address}"]
    assert Registry(store).newest() == generation(1, "a")


def test_another_host_waits_for_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    not_serving(monkeypatch)
    terminal, address = Terminal(), free_address()
    servers = [served(FakeStore(), address)]

    def begin() -> None:
        if terminal.now_s > 105.0 and servers:
            servers[0].__enter__()
            terminal.on_sleep = lambda: None

    terminal.on_sleep = begin
    joined = JoinedRoster(address, around(terminal, OTHER))
    joined.join(wait_s=60.0)
    joined.close(host="b", quiet_s=8.0)
    servers[0].__exit__(None, None, None)
    whose = "the host that has this address"
    refused = f"{address} cannot be reached: Connection refused"
    assert terminal.said == [f"waiting for the roster, which {whose} serves ({refused}), for 58 s at most"]


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_it_is_waited_for_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    not_serving(monkeypatch)
    terminal = Terminal()

    def give_up() -> None:
        if terminal.now_s > 200.0:
            raise TimeoutError

    terminal.on_sleep = give_up
    joined = JoinedRoster(free_address(), around(terminal, OTHER))
    if wait_s:
        with pytest.raises(
            TransientStorageError, match=r"waited 5 s \(`launch.wait_s`\) for the roster, which the host .*refused"
        ):
            joined.join(wait_s=wait_s)
        assert 105.0 <= terminal.now_s < 106.0
    else:
        with pytest.raises(TimeoutError):
            joined.join(wait_s=wait_s)
        assert len(terminal.said) == 1
        assert "at most" not in terminal.said[0]


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    not_serving(monkeypatch)
    joined = JoinedRoster(free_address(), around(Terminal(), OTHER, stop=True))
    with pytest.raises(StopRequestedError, match="asked to stop, while waiting for the roster, which the host"):
        joined.join(wait_s=60.0)


def test_a_name_that_is_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a pod is known when it runs."""
    address = free_address()
    terminal, real = Terminal(), tcp_joining.look_up

    def look_up(asked: RosterAddress, *, limit_s: float) -> list[tuple[str, int]]:
        if terminal.now_s < 103.0:
            raise OSError("Name or service not known")
        return real(asked, limit_s=limit_s)

    monkeypatch.setattr(tcp_joining, "look_up", look_up)
    monkeypatch.setattr("elastictrain.launch.membership.tcp_roster.look_up", look_up)
    joined = JoinedRoster(address, around(terminal))
    joined.join(wait_s=60.0)
    joined.close(host="a", quiet_s=8.0)
    whose = "the host that has this address"
    unknown = "127.0.0.1 cannot be looked up: Name or service not known"
    assert terminal.said == [
        f"waiting for the roster, which {whose} serves ({unknown}), for 58 s at most",
        f"this host serves the roster at {address}",
    ]


def test_the_server_stays_until_the_others_have_read_that_it_is_over() -> None:
    terminal, address = Terminal(), free_address()
    joined = JoinedRoster(address, around(terminal))
    joined.join(wait_s=5.0)
    own = Registry(joined.objects)
    with connected(address) as roster:
        other = Registry(roster)
        for host, registry in (("a", own), ("b", other)):
            registry.write_entry(entry(host, HostState.BUSY))
        own.create(generation(1, "ab", outcome=Outcome.DONE))
        own.write_entry(entry("a", HostState.GONE))
        slept: list[float] = []

        def read_later() -> None:
            slept.append(terminal.now_s)
            if len(slept) == 4:
                assert other.newest() == generation(1, "ab", outcome=Outcome.DONE)
                other.write_entry(entry("b", HostState.GONE))

        terminal.on_sleep = read_later
        joined.close(host="a", quiet_s=30.0)
        assert len(slept) == 4
        with pytest.raises(TransientStorageError):
            other.newest()
    assert terminal.said[1:] == ["this host serves the roster until b can do without it, for 15 s at most"]


@pytest.mark.parametrize(("quiet_s", "waits_s"), [(30.0, 15.0), (0.0, 0.0)], ids=["a living host", "one that fell silent"])
def test_the_server_does_not_stay_for_ever(quiet_s: float, waits_s: float) -> None:
    terminal = Terminal()
    joined = JoinedRoster(free_address(), around(terminal))
    joined.join(wait_s=5.0)
    Registry(joined.objects).write_entry(entry("b"))
    began_s = terminal.now_s
    joined.close(host="a", quiet_s=quiet_s)
    assert terminal.now_s - began_s == waits_s


def test_launchers_that_come_first_are_there_when_the_server_looks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real clocks: one waits for the other."""
    said: list[str] = []
    address, store = RosterAddress("127.0.0.2", free_address("127.0.0.2").port), FakeStore()
    make = partial(Around, store, TOKEN, asked_to_stop=lambda: False, say=said.append)
    waiting = JoinedRoster(address, make(site=Site((), frozenset({"10.0.0.2"}), alone=True)))
    monkeypatch.setattr(tcp_joining, "serves", lambda asked, found, site: "127.0.0.2" in site.addresses)

    def come() -> None:
        waiting.join(wait_s=LIMIT_S)
        Registry(waiting.objects).write_entry(entry("b"))

    thread = threading.Thread(target=come)
    thread.start()
    time.sleep(0.05)
    monkeypatch.setattr(tcp_joining.JoinedRoster, "_is_loopback", lambda self: False)
    serving = JoinedRoster(address, make(site=Site((), frozenset({"127.0.0.2"}), alone=False)))
    serving.join(wait_s=LIMIT_S)
    found = Registry(serving.objects).entries()
    thread.join(LIMIT_S)
    waiting.close(host="b", quiet_s=0.0)
    serving.close(host="a", quiet_s=0.0)
    assert found == [entry("b")]
