"""Refuses what a run commits or deletes after another one has taken its place. Free of torch."""

from elastictrain.checkpoint.lineage import Lineage, number_of
from elastictrain.errors import LeaseLostError
from elastictrain.lease.chain import Chain
from elastictrain.lease.records import Claim
from elastictrain.storage.store import Store


class Fence:
    """Asked before each commit: one read of storage, as long as no newer generation exists.

    The number of an incarnation is that of its generation, so that every manifest carries it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._chain = Chain(store)
        self._known: dict[int, Claim] = {}

    def check(self, incarnation: str, *, step: int) -> None:
        """`incarnation` may commit `step`. Raises: LeaseLostError; StorageError."""
        own = newest = number_of(incarnation)
        if own < 1:
            return
        while self._find(newest + 1) is not None:
            newest += 1
        if newest == own:
            return
        mine = self._find(own)
        for number in range(own + 1, newest + 1):
            other = self._known[number]
            # One that is damaged tells nothing.
            if other.owner and (mine is None or mine.owner not in ("", other.owner)):
                raise LeaseLostError(f"step {step} of {incarnation} is not committed: {other} has taken over the run")
        if not Lineage(self._store).has(incarnation, step):
            raise LeaseLostError(f"step {step} of {incarnation} is not committed: generation {newest} went on without it")

    def _find(self, number: int) -> Claim | None:
        if number not in self._known and (found := self._chain.read(number)) is not None:
            self._known[number] = found
        return self._known.get(number)
