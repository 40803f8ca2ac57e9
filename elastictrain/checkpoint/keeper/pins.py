"""Slots that the keeper reads: mapped once, and locked against their writers while anybody reads them."""

import logging
import threading
from dataclasses import dataclass

from elastictrain.checkpoint.memory.header import SnapshotFacts
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout
from elastictrain.checkpoint.memory.records import load_layout
from elastictrain.checkpoint.memory.slot import Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A whole snapshot that cannot change until it is let go. `digests` are None until they are known."""

    slot: Slot
    facts: SnapshotFacts
    layout: RankLayout
    digests: RankDigests | None = None


class Pins:
    """Hands out pinned snapshots; safe to use from several threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._count: dict[Slot, int] = {}
        self._layouts: dict[str, RankLayout] = {}

    def pin(self, name: str) -> Pinned | None:
        """The snapshot in a slot; None if it is being written, or holds none that is whole.

        Raises: OSError if the slot cannot be opened; InvalidCheckpointError if its layout is not there.
        """
        with self._lock:
            slot = self._open(name)
            if not self._count.get(slot) and not slot.lock(shared=True):
                return None
            self._count[slot] = self._count.get(slot, 0) + 1
        try:
            facts = slot.facts
            if facts is not None:
                return Pinned(slot, facts, self._layout(facts.layout))
        except BaseException:
            self._let_go(slot)
            raise
        self._let_go(slot)
        return None

    def release(self, pinned: Pinned) -> None:
        """Let go of it."""
        self._let_go(pinned.slot)

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            for slot in self._slots.values():
                slot.close()
            self._slots.clear()
            self._count.clear()

    def _open(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is not None and not slot.is_current():
            # Its writer has made another file under that name, for another layout. Who still reads the old one keeps it.
            del self._slots[name]
            if not self._count.get(slot):
                slot.close()
            slot = None
        if slot is None:
            slot = self._slots[name] = Slot.open(f"{self._folder}/{name}")
        return slot

    def _let_go(self, slot: Slot) -> None:
        with self._lock:
            left = self._count.pop(slot, 0) - 1
            if left > 0:
                self._count[slot] = left
            elif left == 0:
                slot.unlock()
                if slot not in self._slots.values():
                    slot.close()

    def _layout(self, digest: str) -> RankLayout:
        layout = self._layouts.get(digest)
        if layout is None:
            layout = self._layouts[digest] = load_layout(self._folder, digest)
        return layout
