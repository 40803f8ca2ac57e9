"""Which slot the next snapshot goes to. Pure: from what all ranks know alike to the same answer on all of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot, as all ranks agree on it."""

    step: int | None
    """Of the snapshot in it; None if it holds nothing that anybody needs."""

    whole: bool
    """Whether that snapshot is complete on every rank."""

    busy: bool
    """Whether it cannot be written now, because some rank or saver is still at work on it."""


def choose_slot(slots: Sequence[SlotView]) -> int | None:
    """The slot for the next snapshot, or None if there is none to be had now.

    A snapshot is only overwritten while another whole one remains, unless there is no other slot; the oldest goes first.
    """
    candidates = []
    for index, slot in enumerate(slots):
        if slot.busy:
            continue
        another = any(other.whole for place, other in enumerate(slots) if place != index)
        if slot.step is None or another or len(slots) == 1:
            candidates.append(index)
    return min(candidates, key=lambda index: (slots[index].step or 0, index), default=None)


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
        """The slot for a snapshot now, if there is one; the snapshots of `protected` steps stay."""
        views = [self._view(index) for index in range(len(self._steps))]
        return choose_slot([replace(view, busy=view.busy or view.step in set(protected) - {None}) for view in views])

    def newest_whole(self) -> int | None:
        """The newest step that is whole on all ranks."""
        return max((view.step for view in map(self._view, range(len(self._steps))) if view.whole and view.step), default=None)

    def started(self, index: int, step: int) -> None:
        """A snapshot of step `step` is being taken into slot `index` on all ranks."""
        self._steps[index] = step

    def _view(self, index: int) -> SlotView:
        step = self._steps[index]
        if step is None:
            return SlotView(None, whole=False, busy=self._busy[index])
        # Flags from before the snapshot began tell nothing about it.
        known = self._known_step > step
        if known and self._torn[index] and not self._busy[index]:
            # It came to nothing on some rank, so it is of no use on any.
            return SlotView(None, whole=False, busy=False)
        return SlotView(step, whole=known and not self._torn[index], busy=not known or self._busy[index])


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
