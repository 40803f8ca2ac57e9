import itertools
from collections.abc import Collection, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.launch.membership.observation import ClusterState, largest_group, unconnected_members, unconnected_pairs
from elastictrain.launch.membership.records import HostRecord
from tests.unit.launch.membership.made import cluster, generation, observed, record


def hosts(heard: Mapping[str, Collection[str]]) -> tuple[list[HostRecord], ClusterState]:
    """Each host with those that it hears; the first one looks around."""
    lines = [record(host, hears=hears) for host, hears in heard.items()]
    others = [observed(line) for line in lines[1:]]
    return lines, cluster(*others, me=lines[0], heard=lines[0].hears)


def group(heard: Mapping[str, Collection[str]]) -> str:
    return "".join(one.host for one in largest_group(*hosts(heard)))


def parts(*names: str) -> dict[str, str]:
    """Hosts that hear those of their own part alone."""
    return {host: part for part in names for host in part}


@pytest.mark.parametrize(
    ("heard", "chosen"),
    [
        (parts("abcd"), "abcd"),
        (parts("a", "bcd"), "bcd"),
        (parts("abc", "d"), "abc"),
        (parts("ab", "cd"), "ab"),
        (parts("a", "b", "c", "d"), "a"),
        (parts("a", "bc", "de"), "bc"),
        # Of one link the other direction is out, too.
        ({"a": "bcd", "b": "acd", "c": "abd", "d": "bc"}, "abc"),
        # b and c do not hear each other; each set without one of them is as large as the other.
        ({"a": "bcd", "b": "ad", "c": "ad", "d": "abc"}, "abd"),
        ({"a": ""}, "a"),
    ],
)
def test_the_largest_set_that_hears_each_other_and_of_equal_ones_the_first(heard: Mapping[str, str], chosen: str) -> None:
    assert group(heard) == chosen


def mutual(heard: Mapping[str, Collection[str]], chosen: Collection[str]) -> bool:
    return all(one in heard[other] and other in heard[one] for one, other in itertools.combinations(chosen, 2))


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), min_size=1))
def test_no_set_is_larger(heard: Mapping[str, Collection[str]]) -> None:
    found = group(heard)
    assert mutual(heard, found)
    larger = itertools.combinations(heard, len(found) + 1)
    assert not any(mutual(heard, chosen) for chosen in larger)


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), min_size=2), st.randoms())
def test_every_host_that_asks_gets_the_same_answer(heard: dict[str, set[str]], chance: Random) -> None:
    lines, _ = hosts(heard)
    asked = chance.choice(lines)
    elsewhere = cluster(*(observed(line) for line in lines if line is not asked), me=asked, heard=asked.hears)
    assert largest_group(lines, elsewhere) == largest_group(*hosts(heard))


def test_of_many_hosts_a_part_of_the_network_is_found() -> None:
    small, large = [f"h{number}" for number in range(40)], [f"z{number}" for number in range(60)]
    heard = {**dict.fromkeys(small, small), **dict.fromkeys(large, large)}
    assert [one.host for one in largest_group(*hosts(heard))] == large
    # One that does not hear its own part.
    heard["z7"] = []
    assert [one.host for one in largest_group(*hosts(heard))] == [host for host in large if host != "z7"]


def test_links_that_are_out_are_named() -> None:
    assert unconnected_pairs(*hosts(parts("ab", "c"))) == [("a", "c"), ("b", "c")]
    _, looked = hosts({"x": "ab", "a": "bx", "b": "a"})
    assert unconnected_members(looked, generation(3, "abc")) == ["b", "c"]
