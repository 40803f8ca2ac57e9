"""Which snapshots go to the buddy next. Pure.

Replicas of a host are only of use together: a step that some rank of it lacks cannot be restored. So they are sent in rounds,
one step of all ranks of the host at a time; what comes in the meantime waits for the next round, the newest of each rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastictrain.checkpoint.memory.header import SnapshotFacts


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that is ready, by the name of its slot."""

    slot: str
    facts: SnapshotFacts


def add_offer(waiting: Mapping[int, Offer], offer: Offer) -> dict[int, Offer]:
    """What waits now, by rank: the newest of each."""
    rank = offer.facts.rank
    there = waiting.get(rank)
    if there is not None and there.facts.step > offer.facts.step:
        return dict(waiting)
    return {**waiting, rank: offer}


def complete_round(waiting: Mapping[int, Offer], *, ranks: Iterable[int]) -> tuple[Offer, ...]:
    """The offers of all `ranks`, in their order, if they are of one step; else none."""
    offers = tuple(waiting[rank] for rank in ranks if rank in waiting)
    steps = {offer.facts.step for offer in offers}
    return offers if len(steps) == 1 and len(offers) == len(tuple(ranks)) else ()
