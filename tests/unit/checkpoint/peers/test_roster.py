"""A roster survives its way between ranks, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.peers.roster import Peer, roster_from_json, roster_to_json

GOOD: dict[str, JsonValue] = {"host": "a", "address": "10.0.0.1", "port": 7, "ranks": [0, 1], "number": 0}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=6),
    max_leaves=8,
)


def test_there_and_back() -> None:
    roster = (Peer("a", "10.0.0.1", 7, (0, 1), 0), Peer("b", "fe80::1", 8, (), 1))
    assert roster_from_json(roster_to_json(roster)) == roster
    assert [peer.place for peer in roster] == ["a (10.0.0.1:7)", "b ([fe80::1]:8)"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": ""}, "`host` must be a name"),
        ({"host": 3}, "`host` must be a name"),
        ({"address": "a\nb"}, "`address` must be a name"),
        ({"address": "a" * 256}, "`address` must be a name"),
        ({"port": 0}, "`port` must be a number from 1 to 65535, but is 0"),
        ({"port": 65536}, "`port` must be"),
        ({"port": True}, "`port` must be"),
        ({"ranks": 1}, "`ranks` must be a list"),
        ({"ranks": [-1]}, "`ranks` must be a number from 0"),
        ({"number": 1.0}, "`number` must be"),
        ({"more": 1}, "must have the fields"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, JsonValue], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        roster_from_json([GOOD | change])


def test_peers_must_be_told_apart() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        roster_from_json([GOOD, GOOD | {"ranks": []}])
    with pytest.raises(ValueError, match=r"at several: \[1\]"):
        roster_from_json([GOOD, GOOD | {"ranks": [1], "number": 1}])
    with pytest.raises(ValueError, match="must be a list of peers"):
        roster_from_json([])


@given(JSON)
def test_anything_else_is_a_value_error(value: JsonValue) -> None:
    try:
        roster = roster_from_json(value)
    except ValueError:
        return
    assert roster_to_json(roster) == value
