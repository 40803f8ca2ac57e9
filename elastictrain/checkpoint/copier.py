"""Makes and page-locks this rank's slots in the background, and copies local tensors into them.

Neither start-up nor a step waits for memory; another thread copies during the next forward and backward passes.
"""

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.memory.folder import SlotName, look, remove_slot, slot_names
from elastictrain.checkpoint.memory.layout import HEADER_BYTES, RankLayout
from elastictrain.checkpoint.memory.records import store_layout
from elastictrain.checkpoint.memory.slot import Slot, facts_in
from elastictrain.checkpoint.tensor_bytes import SEGMENT_BYTES, copy_bytes, cut
from elastictrain.errors import CheckpointError

logger = logging.getLogger(__name__)

_REST = 1.0  # pause after each segment, as a multiple of the time that it took: training runs by then
_LOOK_S = 0.5  # how often a standby looks for the slots of the rank that it may get


class Arena:
    """The slots of one rank; a slot is None until it is ready."""

    def __init__(
        self,
        folder: str,
        layout: RankLayout,
        *,
        rank: int,
        indices: Sequence[int],
        device: torch.device,
        of_another: bool = False,
    ) -> None:
        """`of_another`: another process has this rank now. Its slots are mapped and page-locked here, too, each one after it
        has got its first snapshot; none is made until `take_over`."""
        self.names = tuple(SlotName("own", rank, index) for index in indices)
        self.broken = ""  # why slots are missing; empty if none are
        self._folder = folder
        self._layout = layout
        self._device = device
        self.slots: list[Slot | None] = [None] * len(indices)
        self._registered: list[int] = []
        self._made: deque[Slot] = deque()  # and not ready yet
        self._changed = threading.Condition()  # guards what follows; and `names`, of which only the end changes
        self._of_another = of_another
        self._begun = 0
        self._may_lock = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="arena", daemon=True)

    def allocate(self) -> None:
        """Begin to allocate the memory of the slots, which needs no device. They become ready after `start`."""
        if self._thread.ident is None:
            self._thread.start()

    def start(self) -> None:
        """Make the slots; without effect after the first call."""
        with self._changed:
            self._may_lock = True
            self._changed.notify_all()
        self.allocate()

    def take_over(self, layout: RankLayout, names: Sequence[SlotName]) -> bool:
        """From now on these are its slots, and those that are missing will be made; False if it has other ones, or one of them
        is not in working order."""
        with self._changed:
            surplus = len(self.names) - len(names)
            same = (self._layout.digest, self.names[: len(names)]) == (layout.digest, tuple(names))
            if self.broken or self._stopped or not same or (surplus and not self._of_another) or self._begun > len(names):
                return False
            if not all(slot.is_current() for slot in (*self.slots, *self._made) if slot is not None):
                # Its file was removed meanwhile, and another one may have its name.
                return False
            self.names, self._of_another = tuple(names), False
            del self.slots[len(names) :]
            self._changed.notify_all()
        return True

    def mapped(self, path: str) -> memoryview | None:
        """The bytes of the snapshot in the slot at `path`, if it is one of these and ready."""
        slot = next((one for one in self.slots if one is not None and one.path == path), None)
        return slot.data if slot is not None and slot.is_current() else None

    def close(self) -> None:
        """Unregister and unmap, after the last copy; the content of the slots stays."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._unregister(0)
        while self._made:
            self._made.pop().close()
        for place, slot in enumerate(self.slots):
            if slot is not None:
                slot.close()
                self.slots[place] = None

    def _run(self) -> None:
        try:
            while (lock := self._next()) is not None:
                if lock:
                    slot, place = self._made[0], self._begun - len(self._made)
                    self._lock_pages(slot.map)
                    # Also when stopped: `close` unlocks the pages before it unmaps them.
                    self.slots[place] = slot
                    self._made.popleft()
                    continue
                place = self._begun - 1
                if place == 0:
                    store_layout(self._folder, self._layout)
                find = Slot.find if self._of_another else Slot.make
                found = find(f"{self._folder}/{self.names[place]}", size_bytes=self._layout.size_bytes)
                if found is not None:
                    self._made.append(found)
                    continue
                # The other process has removed it since it was looked for.
                with self._changed:
                    self._begun -= 1
                    self._changed.wait(_LOOK_S)
        except (CheckpointError, OSError) as error:
            self.broken = str(error)
            logger.warning("no more snapshots in host memory: %s", error)
        except Exception as error:
            # The edge of the thread: no rank may wait for slots that never become ready.
            self.broken = f"{type(error).__name__}: {error}"
            logger.exception("no more snapshots in host memory")

    def _next(self) -> bool | None:
        """Wait until there is something to do. True: lock the first slot that is made; False: make the next one; None: all is
        done. One is ready before the next one is made, once they may be locked."""
        with self._changed:
            while not self._stopped and (self._made or self._begun < len(self.names)):
                if self._made and self._may_lock:
                    return True
                if self._begun < len(self.names) and (not self._of_another or self._is_made(self.names[self._begun])):
                    self._begun += 1
                    return False
                self._changed.wait(_LOOK_S)
        return None

    def _is_made(self, name: SlotName) -> bool:
        """Whether the other process has locked this slot: two that lock pages at once slow training more."""
        facts = facts_in(f"{self._folder}/{name}")
        return facts is not None and facts.layout == self._layout.digest

    def _lock_pages(self, mapped: memoryview) -> None:
        """Page-lock what can be locked: copies to other memory are slower, but right."""
        if self._device.type != "cuda":
            return
        before = len(self._registered)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        try:
            torch.cuda.set_device(self._device)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for begin, end in cut(base, len(mapped), segment_bytes=SEGMENT_BYTES):
                if self._stopped:
                    return
                began = time.monotonic()
                code = int(runtime.cudaHostRegister(begin, end - begin, 0))
                if code != 0:
                    raise RuntimeError(f"CUDA error {code}")
                self._registered.append(begin)
                time.sleep(_REST * (time.monotonic() - began))
        except RuntimeError as error:
            # A copy must not cross from locked memory to memory that is not.
            self._unregister(before)
            logger.warning("host memory cannot be page-locked (%s), so snapshots take longer", error)

    def _unregister(self, first: int) -> None:
        for address in self._registered[first:]:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        del self._registered[first:]


def slot_indices(
    folder: str, *, rank: int, size_bytes: int, wanted: int, allocating: bool = False
) -> tuple[list[int], list[int]]:
    """Indices of the slots to use, and those among them that exist with the right size.

    Slots of another size stay until newer snapshots are complete: they may hold the only ones. `allocating`: these slots
    are being made now, by another process or an arena of this one; the file of the one that is allocated is empty, and fits.
    """
    there: dict[int, bool] = {}
    for index in range(10):
        with suppress(OSError):
            found_bytes = os.stat(f"{folder}/{SlotName('own', rank, index)}").st_size  # noqa: PTH116
            there[index] = found_bytes == size_bytes or (allocating and not found_bytes)
    fitting = [index for index, fits in there.items() if fits][:wanted]
    free = [index for index in range(10) if index not in there]
    return (fitting + free)[:wanted], fitting


def free_indices(folder: str, *, rank: int, size_bytes: int, wanted: int, kept_steps: Collection[int]) -> None:
    """Make `slot_indices` find as many as `wanted`, though starts with other world sizes have left their slots.

    Removes as few as possible, the oldest first, and none of `kept_steps`: until newer snapshots are complete, they may be the
    only ones.
    """
    missing = wanted - len(slot_indices(folder, rank=rank, size_bytes=size_bytes, wanted=wanted)[0])
    if missing <= 0:
        return
    held = {one.slot: (one.facts.incarnation, one.facts.step) for one in look(folder, host=0)}
    unused = []
    for name in slot_names(folder):
        age = held.get(str(name), ("", -1))
        other_size = (name.kind, name.rank) == ("own", rank) and os.stat(f"{folder}/{name}").st_size != size_bytes  # noqa: PTH116
        if other_size and age[1] not in kept_steps:
            unused.append((age, name.index, name))
    for _, _, name in sorted(unused, key=lambda one: one[:2])[:missing]:
        logger.warning("%s is removed: starts with other world sizes have left slots under all names", name)
        remove_slot(folder, name)


SMALL_BYTES = 1 << 20  # smaller neighbours are gathered on the device first: a launch takes as long as copying this much
STAGING_BYTES = 32 << 20  # most that is gathered for one copy


@dataclass(frozen=True, slots=True)
class Move:
    """Tensors that are adjacent in the slot, from byte `start` on."""

    start: int
    size_bytes: int
    tensors: tuple[int, ...]


def plan_moves(places: Sequence[tuple[int, int]]) -> tuple[Move, ...]:
    """`places[i]` is (start, bytes) of tensor i in the slot, in increasing order. Empty tensors are left out."""
    moves: list[Move] = []
    for index, (start, size_bytes) in enumerate(places):
        if not size_bytes:
            continue
        last = moves[-1] if moves else None
        if (
            last is not None
            and size_bytes < SMALL_BYTES
            and last.size_bytes + size_bytes <= STAGING_BYTES
            and last.start + last.size_bytes == start
            and places[last.tensors[-1]][1] < SMALL_BYTES
        ):
            moves[-1] = Move(last.start, last.size_bytes + size_bytes, (*last.tensors, index))
        else:
            moves.append(Move(start, size_bytes, (index,)))
    return tuple(moves)


def copy_on_host(moves: Sequence[Move], sources: Sequence[Tensor], target: Tensor) -> None:
    for move in moves:
        start = move.start
        for index in move.tensors:
            target[start : start + sources[index].numel()] = sources[index]
            start += sources[index].numel()


class Copier:
    """Copies the tensors of a layout to their places in a slot. One copy at a time.

    Tensors that a forward pass may change (buffers) are cloned at once, in the order of the device's work. All others change
    only in the update, which waits in `before_update`.
    """

    def __init__(self, layout: RankLayout, *, changing: frozenset[str], device: torch.device) -> None:
        """`changing` names the tensors that forward passes change."""
        places = [
            (base + placed.start, placed.item)
            for file, base in zip(layout.template, layout.starts, strict=True)
            for placed in file.items
        ]
        self._names = [item.name for _, item in places]
        self._sizes = [item.sizes for _, item in places]
        self._moves = plan_moves([(start, item.size_bytes) for start, item in places])
        self._headers = [(base, file.header) for file, base in zip(layout.template, layout.starts, strict=True)]
        self.size_bytes = sum(item.size_bytes for _, item in places)
        self._changing = changing
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        staged = max((move.size_bytes for move in self._moves if len(move.tensors) > 1), default=0)
        self._staging = torch.empty(staged, dtype=torch.uint8, device=device) if self._stream is not None else None
        self._issued: threading.Event | None = None
        self._arrived: torch.cuda.Event | None = None

    def start(self, slot: Slot, parts: Mapping[str, Tensor]) -> Callable[[], float]:
        """Begin to copy `parts` (this rank's part of each tensor) into `slot`.

        Another thread calls the returned function, which copies and returns the seconds that this took.
        """
        sources = []
        for name, sizes in zip(self._names, self._sizes, strict=True):
            part = parts[name]
            assert tuple(part.shape) == sizes, f"{name} has the shape {tuple(part.shape)}, but was planned as {sizes}"  # noqa: S101
            part = part.to(self._device, copy=True) if name in self._changing else part
            sources.append(part.contiguous().reshape(-1).view(torch.uint8))
        target = torch.frombuffer(slot.map, dtype=torch.uint8)[HEADER_BYTES:]
        issued = self._issued = threading.Event()
        ready = None
        if self._stream is not None:
            ready, self._arrived = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The copy begins after this event, when the state is complete.
            ready.record()
        arrived = self._arrived

        def copy() -> float:
            """Returns seconds: on a device by its events, without the wait for the state. Sets `issued` even after an error."""
            began = time.monotonic()
            try:
                for base, header in self._headers:
                    target[base : base + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                if ready is None or arrived is None:
                    copy_on_host(self._moves, sources, target)
                    return time.monotonic() - began
                begun = self._issue(sources, target, ready=ready, arrived=arrived)
            finally:
                # Also after an error: the update waits for this.
                issued.set()
            arrived.synchronize()
            return float(begun.elapsed_time(arrived)) / 1e3

        return copy

    def before_update(self) -> None:
        """Wait until all of the state is copied; on a device only its stream waits."""
        if self._issued is None:
            return
        self._issued.wait()
        self._issued = None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)

    def _issue(
        self, sources: Sequence[Tensor], target: Tensor, *, ready: torch.cuda.Event, arrived: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Have the device copy, after `ready` and up to `arrived`. Returns the event of the first byte: the wait for the state
        does not count."""
        stream = self._stream
        assert stream is not None  # noqa: S101
        torch.cuda.set_device(self._device)
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            begun.record(stream)
            for move in self._moves:
                source = sources[move.tensors[0]]
                if len(move.tensors) > 1 and self._staging is not None:
                    # One staging area is enough: the stream keeps the order of gathering and copying.
                    source = self._staging[: move.size_bytes]
                    torch.cat([sources[index] for index in move.tensors], out=source)
                copy_bytes(target[move.start : move.start + move.size_bytes], source, non_blocking=True)
            arrived.record(stream)
        return begun
