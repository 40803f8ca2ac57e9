"""Which slot the next snapshot goes to. Pure: from what all ranks know alike to the same answer on all of them."""

from collections.abc import Sequence


def choose_slot(steps: Sequence[int | None], *, busy: Sequence[bool]) -> int | None:
    """The slot for the next snapshot, or None if there is none to be had now.

    `steps[i]` is the step of the snapshot that slot i holds, whole on all ranks (None: nothing); `busy[i]` tells whether some
    rank cannot write there now. While a slot is written, another must hold a whole snapshot, as soon as there is one: so the
    newest is overwritten only if an older one remains, and the older is preferred. A single slot has no other.
    """
    free = [index for index in range(len(steps)) if not busy[index]]
    if not free:
        return None
    empty = [index for index in free if steps[index] is None]
    if empty:
        return empty[0]
    if len(steps) > 1 and sum(step is not None for step in steps) < 2:
        # What is free is the only whole one, and the empty slot is not to be had.
        return None
    return min(free, key=lambda index: (steps[index] or 0, index))
