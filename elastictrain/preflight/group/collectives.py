"""What each rank gives to a collective, and what it must get. Pure.

Every rank's values are a row of a table that all ranks can make; a message repeats its row. The length of a row is prime, so
that parts of a message differ wherever it is cut, and a part in the wrong place is found.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

ROW = 1021
"""Elements until a message repeats itself."""

_EXACT = 256
"""Whole numbers up to here are exact in bfloat16, and so is every partial sum of them, in whatever order."""


class Collective(StrEnum):
    """What ranks do together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"
    """Around the ring: to the next rank, from the one before."""


class Values(StrEnum):
    """What messages are made of."""

    KNOWN = "known"
    """Small whole numbers, whose sums are exact."""

    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of a collective. `part`: elements that belong to one rank; a whole message has `part` times world size."""

    collective: Collective
    values: Values
    part: int


@dataclass(frozen=True, slots=True)
class ExpectedResult:
    """What a rank must get: exactly that, in the message's dtype, or in float64 and by how much each element may differ."""

    expected: Tensor
    tolerance: Tensor | None


@dataclass(frozen=True, slots=True)
class Wrong:
    """What a rank got that is not the answer: how many elements, and the first of them."""

    num: int
    index: int
    got: float
    expected: float
    source: int | None
    """The rank from which that element came; None where all ranks have a share in it."""


def table(values: Values, dtype: torch.dtype, *, world_size: int, seed: int) -> Tensor:
    """`[world_size, ROW]`, a row for each rank; the same on all ranks."""
    if values is Values.RANDOM:
        return torch.randn(world_size, ROW, generator=torch.Generator().manual_seed(seed)).to(dtype)
    place = torch.arange(ROW)[None, :] + torch.arange(world_size)[:, None]
    if world_size <= _EXACT // 7:
        return (place % 7).to(dtype)
    # Few ranks contribute to each element, so that sums stay exact in large groups, too; and not the same number to all.
    every = max(3, -(-world_size // _EXACT))
    while world_size % every == 0:
        every += 1
    return (place % every == 0).to(dtype)


def give(trial: Trial, rows: Tensor, *, rank: int) -> Tensor:
    """What this rank puts in, on the device and in the dtype of `rows`."""
    whole = trial.part * len(rows)
    return _repeat(rows[rank], 0, trial.part if trial.collective is Collective.ALL_GATHER else whole)


def answer(trial: Trial, rows: Tensor, *, rank: int) -> ExpectedResult:
    """What this rank must get."""
    world_size, part = len(rows), trial.part
    match trial.collective:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER:
            scattered = trial.collective is Collective.REDUCE_SCATTER
            start, num = (rank * part, part) if scattered else (0, world_size * part)
            total = rows.double().sum(0)
            if trial.values is Values.KNOWN:
                return ExpectedResult(_repeat(total.to(rows.dtype), start, num), None)
            # Each of the additions rounds once, to half of eps of a partial sum that is at most the sum of the magnitudes;
            # doubled for the conversion of the result. Backends are free to add in any order, and in the message's dtype.
            allowed = rows.double().abs().sum(0) * world_size * torch.finfo(rows.dtype).eps
            return ExpectedResult(_repeat(total, start, num), _repeat(allowed, start, num))
        case Collective.ALL_GATHER:
            return ExpectedResult(_repeat(rows, 0, part).flatten(), None)
        case Collective.ALL_TO_ALL:
            return ExpectedResult(_repeat(rows, rank * part, part).flatten(), None)
        case Collective.BROADCAST:
            return ExpectedResult(_repeat(rows[root(trial, world_size=world_size)], 0, world_size * part), None)
        case Collective.SEND_RECV:
            return ExpectedResult(_repeat(rows[(rank - 1) % world_size], 0, world_size * part), None)


def compare(trial: Trial, received: Tensor, right: ExpectedResult, *, rank: int, world_size: int) -> Wrong | None:
    """None if all is right. Not a number is never right."""
    if right.tolerance is None:
        good = received == right.expected
    else:
        good = (received.double() - right.expected).abs() <= right.tolerance
    if bool(good.all()):
        return None
    index = int((~good).int().argmax())
    return Wrong(
        num=int((~good).sum()),
        index=index,
        got=float(received[index]),
        expected=float(right.expected[index]),
        source=_source(trial, index, rank=rank, world_size=world_size),
    )


def root(trial: Trial, *, world_size: int) -> int:
    """Who broadcasts: the last rank, and the first one in the trial with random values."""
    return world_size - 1 if trial.values is Values.KNOWN else 0


def _source(trial: Trial, index: int, *, rank: int, world_size: int) -> int | None:
    match trial.collective:
        case Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return index // trial.part
        case Collective.BROADCAST:
            return root(trial, world_size=world_size)
        case Collective.SEND_RECV:
            return (rank - 1) % world_size
        case _:
            return None


def _repeat(rows: Tensor, start: int, num: int) -> Tensor:
    """`num` elements of each row, from `start` on, as if it repeated itself for ever."""
    start %= ROW
    copies = -(-(start + num) // ROW)
    return rows.repeat(*[1] * (rows.ndim - 1), copies)[..., start : start + num].contiguous()
