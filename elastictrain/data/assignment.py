"""Which positions a rank reads at a step: a function of the step, the world size and the rank alone.

Step s (from 0) consumes positions [s * B, (s + 1) * B). They are cut into chunks of consecutive positions, and chunk c goes
to rank c % world size. Dealt in turn, rather than in one stretch per rank, chunks leave a rank idle in its last pass at most:
every rank has work of its own whenever there are as many chunks as ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from elastictrain.data.order import sample_at


@dataclass(frozen=True, slots=True)
class Portion:
    """Positions [first, end) that one rank reads in one pass; its loss has weight zero unless it `counts`."""

    first: int
    end: int
    counts: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What fixes a rank's share of every step."""

    global_batch: int
    micro_batch: int
    world_size: int
    rank: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a rank: the step (from 0) it belongs to, its positions, and the samples that stand there."""

    step: int
    portion: Portion
    sample_ids: tuple[int, ...]


def chunk_size(*, global_batch: int, micro_batch: int, world_size: int) -> int:
    """Samples per chunk: `micro_batch`, or fewer if some ranks would otherwise have nothing to do.

    As long as global_batch >= micro_batch * world_size it is `micro_batch`, so the contents of micro-batches do not depend on
    the world size.
    """
    return min(micro_batch, -(-global_batch // world_size))


def passes_per_step(*, global_batch: int, micro_batch: int, world_size: int) -> int:
    """Forward passes of every rank per step; the same for all, so that their collectives pair up."""
    size = chunk_size(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size)
    return -(-global_batch // (size * world_size))


def assign(step: int, *, global_batch: int, micro_batch: int, world_size: int, rank: int) -> tuple[Portion, ...]:
    """The portions of `rank` at `step` (from 0), in the order in which it reads them.

    Over all ranks, the portions that count are disjoint and cover [step * global_batch, (step + 1) * global_batch). A rank
    that is short of chunks repeats a real one of the same step that does not count.
    """
    size = chunk_size(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size)
    num_chunks = -(-global_batch // size)
    start = step * global_batch
    num_passes = passes_per_step(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size)
    portions = []
    for number in range(rank, num_passes * world_size, world_size):
        counts = number < num_chunks
        chunk = number if counts else rank % num_chunks
        first = chunk * size
        portions.append(Portion(start + first, start + min(first + size, global_batch), counts))
    return tuple(portions)


def passes(first_step: int, *, last_step: int, share: Share, num_samples: int, seed: int, shuffle: bool) -> Iterator[Pass]:
    """Every pass of a rank from `first_step` up to `last_step` (exclusive), in order."""
    for step in range(first_step, last_step):
        for portion in assign(
            step,
            global_batch=share.global_batch,
            micro_batch=share.micro_batch,
            world_size=share.world_size,
            rank=share.rank,
        ):
            sample_ids = tuple(
                sample_at(position, num_samples=num_samples, seed=seed, shuffle=shuffle)
                for position in range(portion.first, portion.end)
            )
            yield Pass(step, portion, sample_ids)
