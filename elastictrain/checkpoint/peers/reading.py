"""Finds the slot that holds one snapshot, and holds it fast while it is read."""

from collections.abc import Iterator
from contextlib import contextmanager

from elastictrain.checkpoint.memory.inventory import slot_names
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.peers.requests import SnapshotKey, key_of


@contextmanager
def locked_snapshot(folder: str, key: SnapshotKey) -> Iterator[Slot | None]:
    """The slot, own or replica, with exactly that snapshot, locked against its writer; None if there is none."""
    for name in slot_names(folder):
        if name.rank != key.rank:
            continue
        try:
            slot = Slot.open(f"{folder}/{name}")
        except OSError:
            continue
        try:
            # Locked first: what is read then stays as it is.
            if slot.lock(shared=True) and (facts := slot.facts) is not None and key_of(facts) == key:
                yield slot
                return
        finally:
            slot.close()
    yield None
