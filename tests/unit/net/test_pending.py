from hypothesis import given
from hypothesis import strategies as st

from elastictrain.net.server import PendingConnections, PendingLimits

LIMITS = PendingLimits(handshake_s=2.0, most=4, most_per_address=3)


def pending(*addresses: str) -> PendingConnections[int]:
    """Connections 0, 1, 2, ... from these addresses, a second apart."""
    found: PendingConnections[int] = PendingConnections(LIMITS)
    for number, address in enumerate(addresses):
        assert found.add(number, address=address, now_s=float(number)) is None
    return found


def test_the_oldest_of_an_address_goes_where_that_address_has_too_many() -> None:
    assert pending("a", "b", "b", "b").add(9, address="b", now_s=4.0) == 1


def test_where_there_are_too_many_the_address_that_has_the_most_loses_its_oldest() -> None:
    assert pending("a", "b", "a", "b").add(9, address="b", now_s=4.0) == 1
    assert pending("friend", "b", "b", "b").add(9, address="c", now_s=4.0) == 1


def test_among_equals_the_oldest_goes() -> None:
    assert pending("a", "b", "c", "d").add(9, address="e", now_s=4.0) == 0


def test_who_is_let_in_or_gone_makes_room() -> None:
    found = pending("a", "a", "b", "b")
    found.remove(1)
    found.remove(1)
    assert found.add(9, address="a", now_s=4.0) is None
    assert len(found) == 4


def test_whose_time_is_over_goes() -> None:
    found = pending("a", "b", "c")
    assert found.take_overdue(now_s=2.0) == []
    assert found.take_overdue(now_s=3.5) == [0, 1]
    assert found.take_overdue(now_s=3.5) == []
    assert found.give_up_oldest() == 2
    assert found.give_up_oldest() is None


@given(st.lists(st.sampled_from("abcdef"), max_size=60))
def test_the_newest_is_always_taken_in_and_there_are_never_too_many(addresses: list[str]) -> None:
    found: PendingConnections[int] = PendingConnections(LIMITS)
    there: dict[int, str] = {}
    for number, address in enumerate(addresses):
        there[number] = address
        given_up = found.add(number, address=address, now_s=float(number))
        assert given_up != number
        if given_up is not None:
            del there[given_up]
        assert len(found) == len(there) <= LIMITS.most
        assert list(there.values()).count(address) <= LIMITS.most_per_address
