import pytest

from elastictrain.launch.own_host import OwnAddress


@pytest.mark.parametrize(
    ("own", "found", "next_one"),
    [
        ({"10.0.0.1"}, "10.0.0.1", "10.0.0.1"),
        # Another route is the default one now, and the address is still there.
        ({"10.0.0.1", "10.9.0.1"}, "10.9.0.1", "10.0.0.1"),
        ({"10.0.0.2"}, "10.0.0.2", "10.0.0.2"),
        # It is not connected for a while.
        (set(), "127.0.0.1", "10.0.0.1"),
        (set(), "::1", "10.0.0.1"),
    ],
)
def test_an_address_changes_when_the_host_has_it_no_more_and_has_another(own: set[str], found: str, next_one: str) -> None:
    before: set[str] = {"10.0.0.1"}
    now = [before, own, own]
    address = OwnAddress("10.0.0.1", own=lambda: now.pop(0), find=lambda: found)
    assert [address.look(), address.look()] == ["10.0.0.1", next_one]


def test_it_is_looked_at_again_and_one_that_was_set_stays() -> None:
    own = {"10.0.0.1"}
    address = OwnAddress("10.0.0.1", own=lambda: own, find=lambda: min(own, default="127.0.0.1"))
    behind_a_router = OwnAddress("203.0.113.7", own=lambda: own, find=lambda: min(own, default="127.0.0.1"))
    observed = []
    history: list[set[str]] = [{"10.0.0.1"}, set(), {"10.0.0.1"}, {"10.0.0.2"}, {"10.0.0.1"}, set(), set(), {"10.0.0.2"}]
    for now in (*history, {"10.0.0.2", "10.0.0.1"}):
        own = now
        observed.append(address.look())
        assert behind_a_router.look() == "203.0.113.7"
    assert observed == ["10.0.0.1"] * 7 + ["10.0.0.2"] * 2
