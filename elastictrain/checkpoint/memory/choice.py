"""Which slot the next snapshot goes to. Pure: from what all ranks know alike to the same answer on all of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


class SlotBook:
    """What all ranks know alike of the slots: kept by each of them from the same decisions and the same agreed flags."""

    def __init__(self, steps: Sequence[int | None]) -> None:
        """`steps[i]`: the step of the snapshot that slot i holds on every rank, None if there is none."""
        self._steps = list(steps)
        self._known_step = -1
        self._busy = [True] * len(steps)
        self._torn = [False] * len(steps)

    def update(self, step: int, *, busy: Sequence[bool], torn: Sequence[bool]) -> None:
        """The flags of all ranks when they began step `step`: on some of them a slot is busy, or holds nothing whole."""
        self._known_step = step
        self._busy, self._torn = list(busy), list(torn)

    def choose(self, *, protected: Collection[int | None] = ()) -> int | None:
        """The slot for a snapshot now, if there is one; the snapshots of `protected` steps stay.

        A snapshot is only overwritten while another whole one remains, unless there is no other slot; the oldest goes first.
        """
        candidates = []
        for index, step in enumerate(self._steps):
            if self._busy[index] or not self._is_known(step):
                continue
            others = [place for place in range(len(self._steps)) if place != index]
            if step is None or self._torn[index]:
                # What came to nothing on some rank is of no use on any.
                candidates.append((0, index))
            elif step not in protected and (not others or any(map(self._is_whole, others))):
                candidates.append((step, index))
        return min(candidates)[1] if candidates else None

    def newest_whole(self) -> int | None:
        """The newest step that is whole on all ranks."""
        return max((step for index, step in enumerate(self._steps) if step and self._is_whole(index)), default=None)

    def started(self, index: int, step: int) -> None:
        """A snapshot of step `step` is being taken into slot `index` on all ranks."""
        self._steps[index] = step

    def _is_known(self, step: int | None) -> bool:
        """Flags from before a snapshot began tell nothing about it."""
        return step is None or self._known_step > step

    def _is_whole(self, index: int) -> bool:
        step = self._steps[index]
        return step is not None and self._is_known(step) and not self._torn[index]


@dataclass(slots=True)
class Rounds:
    """Which step is being replicated, and which is whole on two hosts: kept by all ranks alike.

    A host that is lost leaves its replicas, all of one step. They are of use only with the snapshots of that very step on the
    other hosts, which therefore keep it until all replicas of a newer one have arrived.
    """

    safe: int | None = None
    under_way: int | None = None
    asked_at: int = -1
    """The step at which the round began."""

    @property
    def protected(self) -> tuple[int | None, int | None]:
        """Steps whose snapshots must stay."""
        return (self.safe, self.under_way)

    def update(self, step: int, *, sending: bool, failed: bool) -> None:
        """The flags of all ranks when they began step `step`: some host still sends, or has failed to."""
        if self.under_way is None or step <= self.asked_at or sending:
            return
        if not failed:
            self.safe = self.under_way
        self.under_way = None

    def next(self, newest: int | None, *, at: int) -> int | None:
        """The step to send now, if there is one."""
        if self.under_way is not None or newest is None or newest <= (self.safe if self.safe is not None else -1):
            return None
        self.under_way, self.asked_at = newest, at
        return newest
