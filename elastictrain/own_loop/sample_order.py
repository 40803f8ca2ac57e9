"""`elastictrain.SampleOrder`: which samples a rank reads, for any DataLoader."""

import os
from collections.abc import Iterator

from torch.utils.data import Sampler

from elastictrain.data.assignment import Share, passes
from elastictrain.errors import ConfigError, Problem
from elastictrain.identity import read_identity
from elastictrain.own_loop.session import present_session


class SampleOrder(Sampler[list[int]]):
    """A `batch_sampler`: the samples of this rank, micro-batch after micro-batch, from step `first_step` on, without end. Each
    epoch visits every sample once, over all ranks, in an order of its own, also where a run goes on with other ranks: what is
    read at a step depends on the step and the seed alone.

        order = elastictrain.SampleOrder(len(dataset), global_batch=64, first_step=run.restore() + 1)
        for step, batch in enumerate(DataLoader(dataset, batch_sampler=order), order.first_step):
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        first_step: int = 1,
    ) -> None:
        """`global_batch`: samples of a step over all ranks; a multiple of their number. `micro_batch`: samples of one batch of
        the loader; a divisor of a rank's part, which is the default. Steps count from 1. Raises: ConfigError."""
        identity = read_identity(os.environ)
        world_size = identity.world_size
        own = global_batch // world_size
        problems = [
            Problem(name, f"must be > 0, but is {value}")
            for name, value in (("num_samples", num_samples), ("global_batch", global_batch), ("first_step", first_step))
            if value < 1
        ]
        if global_batch % world_size:
            problems.append(Problem("global_batch", f"must be a multiple of the {world_size} ranks, but is {global_batch}"))
        elif own > 0 and (micro_batch is not None and (micro_batch < 1 or own % micro_batch)):
            message = f"must divide the {own} samples of a rank (global_batch / ranks), but is {micro_batch}"
            problems.append(Problem("micro_batch", message))
        if problems:
            raise ConfigError(problems)
        self.first_step = first_step
        self.passes_per_step = own // (micro_batch or own)
        """Micro-batches of this rank per step."""
        self._share = Share(global_batch, micro_batch or own, world_size, identity.rank)
        self._num_samples, self._seed, self._shuffle = num_samples, seed, shuffle

    def __iter__(self) -> Iterator[list[int]]:
        # The iterator of a DataLoader draws a random number when it is made: only in the first step of a process.
        if (session := present_session()) is not None:
            session.seed()
        endless = 1 << 62
        for one in passes(
            self.first_step - 1,
            last_step=endless,
            share=self._share,
            num_samples=self._num_samples,
            seed=self._seed,
            shuffle=self._shuffle,
        ):
            yield list(one.sample_ids)
