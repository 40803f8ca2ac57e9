from dataclasses import dataclass, field

from elastictrain.launch.heartbeat import SilenceCheck

LOST_S = 4.0


@dataclass
class Watched:
    """Looks twice a second for hosts that are silent."""

    hosts: str
    now_s: float = 0.0
    last_s: dict[str, float] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.check = SilenceCheck(frozenset(self.hosts), self.now_s, self.now_s)

    def listen(self, *, until_s: float, host: str = "") -> frozenset[str]:
        """Hears `host` each time."""
        while self.now_s < until_s:
            self.look(now_s=self.now_s + 0.5, host=host)
        return self.silent

    def look(self, *, now_s: float, host: str = "") -> frozenset[str]:
        self.now_s = now_s
        self.last_s |= {host: now_s} if host else {}
        self.silent = self.check.find_silent(self.last_s, now_s=now_s, lost_s=LOST_S)
        return self.silent


def test_nobody_is_silent_who_is_not_listened_to() -> None:
    assert Watched("").listen(until_s=60.0) == frozenset()


def test_silence_counts_from_when_one_begins_to_listen() -> None:
    watched = Watched("ab")
    assert watched.listen(until_s=4.0) == frozenset()
    assert watched.listen(until_s=4.5) == {"a", "b"}


def test_who_is_heard_is_not_silent() -> None:
    watched = Watched("ab")
    assert watched.listen(until_s=30.0, host="a") == {"b"}
    assert watched.listen(until_s=34.0) == {"b"}
    assert watched.listen(until_s=34.5) == {"a", "b"}


def test_a_link_that_flaps_for_less_than_the_window_costs_nothing() -> None:
    watched = Watched("a")
    watched.listen(until_s=10.0, host="a")
    assert watched.listen(until_s=13.5) == frozenset()
    assert watched.listen(until_s=17.0, host="a") == frozenset()


def test_who_comes_back_is_heard_again() -> None:
    watched = Watched("a")
    assert watched.listen(until_s=10.0) == {"a"}
    assert watched.listen(until_s=10.5, host="a") == frozenset()


def test_datagrams_of_others_do_not_count() -> None:
    assert Watched("a").listen(until_s=5.0, host="z") == {"a"}


def test_who_was_frozen_itself_accuses_nobody() -> None:
    watched = Watched("ab")
    watched.listen(until_s=10.0, host="a")
    assert watched.look(now_s=100.0) == frozenset()
    # One datagram that had waited in the socket meanwhile is no proof of life now: from here on all have the same time.
    assert watched.listen(until_s=104.0) == frozenset()
    assert watched.listen(until_s=104.5) == {"a", "b"}


def test_what_waited_in_the_socket_while_frozen_is_not_the_last_datagram() -> None:
    watched = Watched("a")
    watched.listen(until_s=10.0, host="a")
    assert watched.look(now_s=100.0, host="a") == frozenset()
    assert watched.listen(until_s=104.5) == {"a"}


def test_a_short_pause_of_its_own_is_none() -> None:
    watched = Watched("a")
    for now_s in (2.0, 4.0):
        assert watched.look(now_s=now_s) == frozenset()
    assert watched.look(now_s=4.1) == {"a"}
