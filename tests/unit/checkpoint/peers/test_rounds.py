"""Replicas go in rounds of one step of all ranks, and only the newest wait."""

from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.peers.rounds import Offer, add_offer, complete_round
from tests.unit.checkpoint.peers.hosts import facts_of


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5))))
def test_the_newest_of_each_rank_waits(offers: list[tuple[int, int]]) -> None:
    waiting: dict[int, Offer] = {}
    for rank, step in offers:
        waiting = add_offer(waiting, Offer("s", facts_of(rank, step)))
    newest = {rank: max(step for other, step in offers if other == rank) for rank, _ in offers}
    assert {rank: offer.facts.step for rank, offer in waiting.items()} == newest
    found = complete_round(waiting, ranks=range(4))
    if newest.keys() == {0, 1, 2, 3} and len(set(newest.values())) == 1:
        assert [offer.facts.rank for offer in found] == [0, 1, 2, 3]
    else:
        assert found == ()


def test_the_same_step_again_replaces_what_waits() -> None:
    first, second = Offer("own-r00000-s0", facts_of()), Offer("own-r00000-s1", facts_of())
    assert add_offer(add_offer({}, first), second) == {0: second}
