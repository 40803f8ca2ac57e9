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
        self._count: dict[str, int] = {}
        self._layouts: dict[str, RankLayout] = {}

    def pin(self, name: str) -> Pinned | None:
        """The snapshot in a slot; None if it is being written, or holds none that is whole.

        Raises: OSError if the slot cannot be opened; InvalidCheckpointError if its layout is not there.
        """
        with self._lock:
            slot = self._open(name)
            if not self._count.get(name) and not slot.lock(shared=True):
                return None
            self._count[name] = self._count.get(name, 0) + 1
        try:
            facts = slot.facts
            if facts is not None:
                return Pinned(slot, facts, self._layout(facts.layout))
        except BaseException:
            self._let_go(name)
            raise
        self._let_go(name)
        return None

    def release(self, pinned: Pinned) -> None:
        """Let go of it."""
        self._let_go(pinned.slot.path.rpartition("/")[2])

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
            if not self._count.get(name):
                slot.close()
            self._slots.pop(name)
            self._count.pop(name, None)
            slot = None
        if slot is None:
            slot = self._slots[name] = Slot.open(f"{self._folder}/{name}")
        return slot

    def _let_go(self, name: str) -> None:
        with self._lock:
            left = self._count.get(name, 0) - 1
            slot = self._slots.get(name)
            if left > 0:
                self._count[name] = left
                return
            self._count.pop(name, None)
            if slot is not None:
                slot.unlock()

    def _layout(self, digest: str) -> RankLayout:
        layout = self._layouts.get(digest)
        if layout is None:
            layout = self._layouts[digest] = load_layout(self._folder, digest)
        return layout
