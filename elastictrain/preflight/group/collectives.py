"""What each rank gives to a collective, and what it must get. A rank's values are a row of a table that all ranks can make; a
message repeats its row. The row length is prime, so parts of a message differ wherever it is cut: a misplaced part is found."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed two of them, and warns of the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MB = 1 << 20
DTYPES = (torch.float32, torch.bfloat16)
_SEED = 20
_SMALL = 7  # elements per rank of a small message: odd, and fewer than the threads that share it
ROW = 1021  # elements until a message repeats itself
_LEAST_MOST = 6  # values reach at least from -6 to 6


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"  # around the ring: to the next rank, from the one before


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of a collective."""

    collective: Collective
    part: int  # elements of one rank; a whole message has `part` times world size


@dataclass(frozen=True, slots=True)
class ExpectedResult:
    """What a rank must get, exactly."""

    expected: Tensor
    sources: tuple[int, ...] = ()  # ranks of its parts, all of one length; empty if all share in each element

    def source(self, index: int) -> int | None:
        """The rank from which an element comes; None if all have a share in it."""
        return self.sources[index * len(self.sources) // len(self.expected)] if self.sources else None


def table(dtype: torch.dtype, *, world_size: int) -> Tensor:
    """`[world_size, ROW]`, a row for each rank: the largest whole numbers whose partial sums are all exact, in any order."""
    exact = round(2 / torch.finfo(dtype).eps)
    most = max(_LEAST_MOST, exact // world_size)
    rows = torch.randint(-most, most + 1, (world_size, ROW), generator=torch.Generator().manual_seed(_SEED))
    # Where sums of so many ranks would not be exact, only some of them contribute to each element.
    every = -(-world_size * (_LEAST_MOST + 1) // exact)
    place = torch.arange(ROW)[None, :] + torch.arange(world_size)[:, None]
    return (rows * (place % every == 0)).to(dtype)


def give(trial: Trial, rows: Tensor, *, rank: int) -> Tensor:
    """The input of this rank, on the device and in the dtype of `rows`."""
    whole = trial.part * len(rows)
    return _repeat(rows[rank], 0, trial.part if trial.collective is Collective.ALL_GATHER else whole)


def answer(trial: Trial, rows: Tensor, *, rank: int) -> ExpectedResult:
    """What `Collectives.run` must return on this rank. `rows` [world_size, ROW]: those of `table`. Pure."""
    world_size, part, sources = len(rows), trial.part, tuple(range(len(rows)))
    start, num = 0, world_size * part
    match trial.collective:
        case Collective.ALL_GATHER:
            num = part
        case Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
            start, num = rank * part, part
        case Collective.BROADCAST:
            sources = (root(trial, world_size=world_size),)
        case Collective.SEND_RECV:
            sources = ((rank - 1) % world_size,)
    if trial.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
        return ExpectedResult(_repeat(rows.double().sum(0).to(rows.dtype), start, num))
    return ExpectedResult(_repeat(rows[list(sources)], start, num).flatten(), sources)


def find_wrong(received: Tensor, right: ExpectedResult) -> tuple[int, int] | None:
    """Number of wrong elements and index of the first; None if all are right. NaN is always wrong."""
    wrong = received != right.expected
    return (int(wrong.sum()), int(wrong.int().argmax())) if bool(wrong.any()) else None


def root(trial: Trial, *, world_size: int) -> int:
    """The broadcasting rank: another one for messages of another size."""
    return trial.part % world_size


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of the default group, on flat tensors of this rank's device. Collective: yes, all of them."""

    rank: int
    world_size: int
    device: torch.device

    def run(self, trial: Trial, given: Tensor) -> Tensor:
        """The flat result of this rank; `all_reduce` and `broadcast` put it into `given`. Collective: yes."""
        rank, world_size = self.rank, self.world_size
        parts = {Collective.ALL_GATHER: world_size * trial.part, Collective.REDUCE_SCATTER: trial.part}
        # An element that no rank writes must not look right by accident.
        output = given.new_full((parts.get(trial.collective, len(given)),), float("nan"))
        match trial.collective:
            case Collective.ALL_REDUCE:
                self.all_reduce(output := given)
            case Collective.BROADCAST:
                dist.broadcast(output := given, root(trial, world_size=world_size))
            case Collective.ALL_GATHER:
                _gather(output, given)
            case Collective.REDUCE_SCATTER:
                _scatter(output, given)
            case Collective.ALL_TO_ALL:
                dist.all_to_all_single(output, given)
            case Collective.SEND_RECV:
                self.send_recv(output, given, source=(rank - 1) % world_size, target=(rank + 1) % world_size)
        return output

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum over all ranks, in place."""
        dist.all_reduce(buffer)

    def send_recv(self, output: Tensor | None, buffer: Tensor | None, *, source: int, target: int) -> None:
        """Send and receive at once, if both buffers are given."""
        # Batched: otherwise NCCL makes a communicator for each pair, and two ranks that both send first hang.
        wanted = [] if buffer is None else [dist.P2POp(dist.isend, buffer, target)]
        wanted += [] if output is None else [dist.P2POp(dist.irecv, output, source)]
        for work in dist.batch_isend_irecv(wanted) if wanted else ():
            work.wait()


def _repeat(rows: Tensor, start: int, num: int) -> Tensor:
    """`num` elements of each row from `start`, as if the row repeated itself for ever."""
    start %= ROW
    copies = -(-(start + num) // ROW)
    return rows.repeat(*[1] * (rows.ndim - 1), copies)[..., start : start + num].contiguous()


@dataclass(frozen=True, slots=True)
class WrongResult:
    """A wrong result on one rank, in words, and the rank from which it came, if known."""

    text: str
    source: int | None


def examine(collective: Collective, at: Callable[[str], None], *, collectives: Collectives, full: bool) -> list[WrongResult]:
    """All trials of one collective, in the same order on every rank; `at` gets the name of each one first. Collective: yes."""
    rank, world_size, device = collectives.rank, collectives.world_size, collectives.device
    if collective is Collective.SEND_RECV and world_size == 1:
        return []
    full_bytes, quick_bytes = (64 * MB, MB) if device.type == "cuda" else (4 * MB, MB // 4)
    found = []
    for dtype in DTYPES:
        rows = table(dtype, world_size=world_size).to(device)
        # All ranks' parts together.
        large = max(1, (full_bytes if full else quick_bytes) // (dtype.itemsize * world_size))
        for size, part in (("small", _SMALL), ("large", large)):
            trial, name = Trial(collective, part), f"{str(dtype).removeprefix('torch.')}, {size}"
            at(name)
            received = collectives.run(trial, give(trial, rows, rank=rank))
            right = answer(trial, rows, rank=rank)
            if (wrong := find_wrong(received, right)) is not None:
                num, index = wrong
                text = f"{num} of {received.numel()} elements ({name}), the first at {index}: {float(received[index]):g}"
                found.append(WrongResult(f"{text} instead of {float(right.expected[index]):g}", right.source(index)))
    return found
