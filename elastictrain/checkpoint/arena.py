"""This rank's slots: made and page-locked in the background, so that neither start-up nor a step waits for memory."""

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence

import torch

from elastictrain.checkpoint.memory.folder import SlotName, look, remove_slot, slot_names
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.records import store_layout
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import CheckpointError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 32 << 20
"""Registered at a time: the driver serves nobody else meanwhile, about 10 ms."""

_REST = 2.0
"""Rest after each segment, as a multiple of the time that it took: training is under way by then."""


class Arena:
    """The slots of one rank; a slot is None until it can be copied to."""

    def __init__(self, folder: str, layout: RankLayout, *, rank: int, indices: Sequence[int], device: torch.device) -> None:
        """`indices` name the slots of this rank in the order of their use."""
        self.names = tuple(SlotName("own", rank, index) for index in indices)
        self.broken = ""
        """Why there are fewer slots than were asked for; empty if there are not."""
        self._folder = folder
        self._layout = layout
        self._device = device
        self._slots: list[Slot | None] = [None] * len(indices)
        self._registered: list[int] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="arena", daemon=True)

    def start(self) -> None:
        """Begin to make slots; they become ready one after another."""
        self._thread.start()

    def slot(self, place: int) -> Slot | None:
        """The slot at a place of `names`, once it is ready."""
        return self._slots[place]

    def close(self) -> None:
        """Unregister and unmap, after the last copy; what is in the slots stays."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        self._unregister(self._registered)
        self._registered.clear()
        for place, slot in enumerate(self._slots):
            if slot is not None:
                slot.close()
                self._slots[place] = None

    def _run(self) -> None:
        try:
            store_layout(self._folder, self._layout)
            for place, name in enumerate(self.names):
                slot = Slot.make(f"{self._folder}/{name}", size_bytes=self._layout.size_bytes)
                self._lock_pages(slot.map)
                # Also when stopped: pages are unlocked before they are unmapped, and `close` does both.
                self._slots[place] = slot
                if self._stopped:
                    return
        except (CheckpointError, OSError) as error:
            self.broken = str(error)
            logger.warning("no more snapshots in host memory: %s", error)
        except Exception as error:
            # The edge of the thread: nobody must wait for slots that never come.
            self.broken = f"{type(error).__name__}: {error}"
            logger.exception("no more snapshots in host memory")

    def _lock_pages(self, mapped: mmap.mmap) -> None:
        """Page-lock what can be: copies to memory that is not locked are slower, and right."""
        if self._device.type != "cuda":
            return
        before = len(self._registered)
        try:
            self._register(mapped)
        except RuntimeError as error:
            # A copy must not cross from locked memory to memory that is not.
            self._unregister(self._registered[before:])
            del self._registered[before:]
            logger.warning("host memory cannot be page-locked (%s), so snapshots take longer", error)

    def _unregister(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def _register(self, mapped: mmap.mmap) -> None:
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        for begin in range(0, len(mapped), SEGMENT_BYTES):
            if self._stopped:
                return
            began = time.monotonic()
            code = int(runtime.cudaHostRegister(base + begin, min(SEGMENT_BYTES, len(mapped) - begin), 0))
            if code != 0:
                raise RuntimeError(f"CUDA error {code}")
            self._registered.append(base + begin)
            time.sleep(_REST * (time.monotonic() - began))


def slot_indices(folder: str, *, rank: int, size_bytes: int, wanted: int) -> tuple[list[int], list[int]]:
    """Indices of the slots to use, and those among them that are there already with the right size.

    Slots of another size stay until newer snapshots are whole: what is in them may be all that there is.
    """
    there: dict[int, bool] = {}
    for index in range(10):
        try:
            found = os.stat(f"{folder}/{SlotName('own', rank, index)}")  # noqa: PTH116
        except OSError:
            continue
        there[index] = found.st_size == size_bytes
    fitting = [index for index, fits in there.items() if fits][:wanted]
    free = [index for index in range(10) if index not in there]
    return (fitting + free)[:wanted], fitting


def free_indices(folder: str, *, rank: int, size_bytes: int, wanted: int, restored_step: int | None) -> None:
    """See that `slot_indices` finds as many as are wanted, though starts with other world sizes have left their slots.

    As few as possible are removed, the oldest first, and never one of the step that was restored: until a newer snapshot is
    whole, it may be all that there is.
    """
    missing = wanted - len(slot_indices(folder, rank=rank, size_bytes=size_bytes, wanted=wanted)[0])
    if missing <= 0:
        return
    held = {one.slot: (one.facts.incarnation, one.facts.step) for one in look(folder, host=0)}
    unused = []
    for name in slot_names(folder):
        age = held.get(str(name), ("", -1))
        other_size = (name.kind, name.rank) == ("own", rank) and os.stat(f"{folder}/{name}").st_size != size_bytes  # noqa: PTH116
        if other_size and (restored_step is None or age[1] != restored_step):
            unused.append((age, name.index, name))
    for _, _, name in sorted(unused, key=lambda one: one[:2])[:missing]:
        logger.warning("%s is removed: starts with other world sizes have left slots under all names", name)
        remove_slot(folder, name)
