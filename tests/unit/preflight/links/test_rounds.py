import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.preflight.links.rounds import (
    contact_links,
    first_rounds,
    num_first_rounds,
    num_second_rounds,
    second_rounds,
    tournament,
)


@given(num_hosts=st.integers(0, 130), seed=st.integers(0, 1000))
def test_pairs_of_a_round_are_disjoint_and_nobody_meets_twice(num_hosts: int, seed: int) -> None:
    rounds = first_rounds(num_hosts, seed=seed)
    assert len(rounds) == num_first_rounds(num_hosts)
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts)) == num_hosts - num_hosts % 2
        assert set(hosts) <= set(range(num_hosts))
        assert all(a < b for a, b in pairs)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))


@pytest.mark.parametrize("num_hosts", [2, 3, 4])
def test_few_hosts_all_meet(num_hosts: int) -> None:
    met = {pair for pairs in first_rounds(num_hosts, seed=7) for pair in pairs}
    assert len(met) == num_hosts * (num_hosts - 1) // 2


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_in_disjoint_rounds(num: int) -> None:
    rounds = list(tournament(range(num)))
    met = [pair for one in rounds for pair in one]
    assert sorted(met) == [(low, high) for low in range(num) for high in range(low + 1, num)]
    assert len(rounds) == (num - 1 if num % 2 == 0 else num)
    for one in rounds:
        assert len({place for pair in one for place in pair}) == 2 * len(one)


@given(num_hosts=st.integers(5, 5000))
def test_rounds_grow_as_the_logarithm_does(num_hosts: int) -> None:
    assert num_first_rounds(num_hosts) + num_second_rounds(num_hosts) <= math.ceil(math.log2(num_hosts)) + 2
    assert num_first_rounds(num_hosts) >= 3


def test_lone_hosts_have_no_rounds() -> None:
    assert first_rounds(1, seed=0) == first_rounds(0, seed=0) == ()
    assert num_second_rounds(1) == 0


def test_seeds_measure_other_links() -> None:
    assert first_rounds(64, seed=1) != first_rounds(64, seed=2)
    assert first_rounds(64, seed=1) == first_rounds(64, seed=1)


def test_suspects_meet_good_hosts_that_are_new_to_them() -> None:
    rounds = second_rounds(hosts={0}, links=(), good=[1, 2, 3], met={(0, 1), (2, 0)}, num=2)
    assert rounds == (((0, 3),), ((0, 1),))


def test_suspects_meet_somebody_again_rather_than_nobody() -> None:
    assert second_rounds(hosts={2}, links=(), good=[0, 1], met={(0, 2), (1, 2)}, num=2) == (((0, 2),), ((1, 2),))
    assert second_rounds(hosts={0, 1}, links=(), good=[], met={(0, 1)}, num=2) == (((0, 1),), ((0, 1),))


def test_suspicious_links_are_measured_twice_where_there_is_room() -> None:
    assert second_rounds(hosts=(), links={(1, 0), (0, 1)}, good=[2], met=(), num=2) == (((0, 1),), ((0, 1),))
    crowded = second_rounds(hosts=(), links={(0, 1), (0, 2), (3, 4)}, good=[], met=(), num=2)
    assert crowded == (((0, 1), (3, 4)), ((0, 2), (3, 4)))


@given(num_hosts=st.integers(2, 60), data=st.data())
def test_second_rounds_are_disjoint_and_hold_every_suspect(num_hosts: int, data: st.DataObject) -> None:
    everybody = range(num_hosts)
    suspects = data.draw(st.sets(st.sampled_from(everybody), max_size=num_hosts // 2))
    links = data.draw(st.sets(st.tuples(st.sampled_from(everybody), st.sampled_from(everybody)), max_size=20))
    links = {(a, b) for a, b in links if a != b}
    good = [host for host in everybody if host not in suspects]
    rounds = second_rounds(hosts=suspects, links=links, good=good, met=(), num=num_second_rounds(num_hosts))
    assert len(rounds) <= num_second_rounds(num_hosts)
    for pairs in rounds:
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1
    assert suspects <= {host for pairs in rounds for pair in pairs for host in pair}


def test_contact_links_cover_both_directions() -> None:
    assert contact_links(3, all_pairs=False, num_distances=2) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert contact_links(1, all_pairs=True) == ()
    assert len(contact_links(16, all_pairs=True)) == 16 * 15
    for links in (contact_links(1024, all_pairs=False), contact_links(100, all_pairs=False, num_distances=2)):
        assert {(b, a) for a, b in links} == set(links)
    assert max(Counter(a for a, _ in contact_links(1024, all_pairs=False)).values()) <= 20
    assert set(Counter(a for a, _ in contact_links(100, all_pairs=False, num_distances=2)).values()) == {4}
