"""Whatever the hosts are: a buddy is elsewhere, the load is even, and everybody comes to the same answer."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.peers.placement import (
    Peer,
    check_roster,
    replica_sources_of,
    replica_target_of,
)


def roster_of(hosts: list[str]) -> list[Peer]:
    return [Peer(host, "10.0.0.1", 1, (2 * n, 2 * n + 1), n) for n, host in enumerate(hosts)]


ROSTERS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12).map(roster_of)


@given(ROSTERS)
def test_a_buddy_is_on_another_host(roster: list[Peer]) -> None:
    several = len({peer.host for peer in roster}) > 1
    for peer in roster:
        buddy = replica_target_of(peer, roster)
        assert (buddy is not None) == several
        assert buddy is None or buddy.host != peer.host


@given(ROSTERS)
def test_any_host_may_be_lost(roster: list[Peer]) -> None:
    hosts = {peer.host for peer in roster}
    for lost in hosts if len(hosts) > 1 else ():
        holders = {peer: {peer.host} for peer in roster}
        for peer in roster:
            buddy = replica_target_of(peer, roster)
            assert buddy is not None
            holders[peer].add(buddy.host)
        assert all(where - {lost} for where in holders.values())


@given(ROSTERS)
def test_the_load_is_even(roster: list[Peer]) -> None:
    largest = max(Counter(peer.host for peer in roster).values())
    others = len(roster) - largest
    most = max(1, -(-largest // others)) if others else 0
    assert all(len(replica_sources_of(peer, roster)) <= most for peer in roster)
    if 2 * largest <= len(roster):
        assert all(len(replica_sources_of(peer, roster)) == 1 for peer in roster)


@given(ROSTERS, st.randoms())
def test_the_order_of_the_roster_is_of_no_consequence(roster: list[Peer], random: Random) -> None:
    shuffled = random.sample(roster, len(roster))
    for peer in roster:
        assert replica_target_of(peer, shuffled) == replica_target_of(peer, roster)
        assert replica_sources_of(peer, shuffled) == replica_sources_of(peer, roster)


@given(ROSTERS)
def test_wards_are_the_inverse(roster: list[Peer]) -> None:
    for peer in roster:
        assert all(replica_target_of(ward, roster) == peer for ward in replica_sources_of(peer, roster))
    if len({peer.host for peer in roster}) > 1:
        assert sorted(ward.number for peer in roster for ward in replica_sources_of(peer, roster)) == list(range(len(roster)))


def test_one_peer_per_host_makes_a_ring() -> None:
    roster = roster_of(["c", "a", "b"])
    assert [buddy.host if (buddy := replica_target_of(peer, roster)) else "" for peer in roster] == ["a", "b", "c"]


def test_a_stranger_has_no_buddy() -> None:
    with pytest.raises(ValueError, match="roster"):
        replica_target_of(Peer("z", "10.0.0.1", 1, (), 99), roster_of(["a", "b"]))


def test_the_place_of_a_peer_is_an_address_and_a_port() -> None:
    roster = (Peer("a", "10.0.0.1", 7, (0, 1), 0), Peer("b", "fe80::1", 8, (), 1))
    assert [peer.place for peer in roster] == ["a (10.0.0.1:7)", "b ([fe80::1]:8)"]


def test_peers_must_be_told_apart() -> None:
    one = Peer("a", "10.0.0.1", 7, (0, 1), 0)
    check_roster([one, replace(one, ranks=(), number=1)])
    with pytest.raises(ValueError, match="different numbers"):
        check_roster([one, replace(one, ranks=())])
    with pytest.raises(ValueError, match=r"\[1\]"):
        check_roster([one, replace(one, ranks=(1,), number=1)])
    with pytest.raises(ValueError, match="peers"):
        check_roster([])
