"""Copies local tensors into a slot, from another thread, while the next forward and backward passes run."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.arena import SEGMENT_BYTES
from elastictrain.checkpoint.memory.layout import HEADER_BYTES, RankLayout
from elastictrain.checkpoint.memory.slot import Slot

SMALL_BYTES = 1 << 20
"""Below this, neighbours are gathered on the device first: the launch of a copy takes as long as that many bytes."""

STAGING_BYTES = 32 << 20
"""Upper bound of what is gathered for one copy."""


@dataclass(frozen=True, slots=True)
class Move:
    """Tensors that lie side by side in the slot, beginning at byte `start`."""

    start: int
    size_bytes: int
    tensors: tuple[int, ...]


def plan_moves(places: Sequence[tuple[int, int]]) -> tuple[Move, ...]:
    """`places[i]` is (start, bytes) of tensor i in the slot, in increasing order. Tensors without bytes are left out."""
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


def cut(start: int, size_bytes: int, *, segment_bytes: int) -> list[tuple[int, int]]:
    """The range as pieces (start, end) that cross no multiple of `segment_bytes`: memory registered in segments cannot be the
    target of a copy that spans two of them."""
    pieces = []
    end = start + size_bytes
    while start < end:
        stop = min(end, (start // segment_bytes + 1) * segment_bytes)
        pieces.append((start, stop))
        start = stop
    return pieces


class Copier:
    """Knows where each tensor of a layout goes. One copy at a time.

    Tensors that a forward pass may change (buffers) are cloned at once, in the order of the device's work; all others change
    only in the update, which waits for `before_update`.
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
        """Of all tensors."""
        self._changing = changing
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        staged = max((move.size_bytes for move in self._moves if len(move.tensors) > 1), default=0)
        self._staging = torch.empty(staged, dtype=torch.uint8, device=device) if self._stream is not None else None
        self._issued: threading.Event | None = None
        self._arrived: torch.cuda.Event | None = None

    def start(self, slot: Slot, parts: Mapping[str, Tensor]) -> Callable[[], float]:
        """Begin to copy `parts` (this rank's part of each tensor) into `slot`.

        Another thread calls what is returned: it copies, and returns the seconds that this took.
        """
        sources = [self._source(name, sizes, parts) for name, sizes in zip(self._names, self._sizes, strict=True)]
        target = torch.frombuffer(slot.map, dtype=torch.uint8)[HEADER_BYTES:]
        issued = self._issued = threading.Event()
        ready = None
        if self._stream is not None:
            ready, self._arrived = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The state is as it is to be copied.
            ready.record()
        arrived = self._arrived

        def copy() -> float:
            began = time.monotonic()
            try:
                for base, header in self._headers:
                    target[base : base + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                if ready is None or arrived is None:
                    self._copy_on_host(sources, target)
                    return time.monotonic() - began
                begun = self._issue(sources, target, ready=ready, arrived=arrived)
            finally:
                # Also after an error: the update waits for this.
                issued.set()
            arrived.synchronize()
            return float(begun.elapsed_time(arrived)) / 1e3

        return copy

    def before_update(self) -> None:
        """The state is about to change: wait until all of it is copied. On a device only its stream waits."""
        if self._issued is None:
            return
        self._issued.wait()
        self._issued = None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)

    def _source(self, name: str, sizes: tuple[int, ...], parts: Mapping[str, Tensor]) -> Tensor:
        part = parts[name]
        assert tuple(part.shape) == sizes, f"{name} has the shape {tuple(part.shape)}, but was planned as {sizes}"  # noqa: S101
        if name in self._changing:
            part = part.clone()
        return part.contiguous().reshape(-1).view(torch.uint8)

    def _copy_on_host(self, sources: Sequence[Tensor], target: Tensor) -> None:
        for move in self._moves:
            start = move.start
            for index in move.tensors:
                target[start : start + sources[index].numel()] = sources[index]
                start += sources[index].numel()

    def _issue(
        self, sources: Sequence[Tensor], target: Tensor, *, ready: torch.cuda.Event, arrived: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Has the device copy, from when the state is `ready` until all of it has `arrived`. Returns the event of the first
        byte, so that the wait for the state does not count."""
        stream = self._stream
        assert stream is not None  # noqa: S101
        torch.cuda.set_device(self._device)
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            begun.record(stream)
            for move in self._moves:
                source = self._gathered(move, sources)
                # Registration is counted from the beginning of the slot, its header included.
                for begin, end in cut(move.start + HEADER_BYTES, move.size_bytes, segment_bytes=SEGMENT_BYTES):
                    first, last = begin - HEADER_BYTES, end - HEADER_BYTES
                    target[first:last].copy_(source[first - move.start : last - move.start], non_blocking=True)
            arrived.record(stream)
        return begun

    def _gathered(self, move: Move, sources: Sequence[Tensor]) -> Tensor:
        if len(move.tensors) == 1:
            return sources[move.tensors[0]]
        assert self._staging is not None  # noqa: S101
        # One staging area is enough: the stream keeps the order of gathering and copying.
        gathered = self._staging[: move.size_bytes]
        torch.cat([sources[index] for index in move.tensors], out=gathered)
        return gathered
