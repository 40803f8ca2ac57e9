"""How the tensors of a rank are copied into a slot: few large copies instead of many small ones. Pure, and free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass

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
