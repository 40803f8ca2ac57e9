"""Runs collectives on values whose result is known, and compares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.preflight.group.backend import Collectives
from elastictrain.preflight.group.collectives import Collective, Trial, Values, answer, compare, give, root, table
from elastictrain.preflight.group.options import GroupOptions

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class WrongResult:
    """A wrong result on one rank, in words, and from which rank it came, where that can be told."""

    text: str
    source: int | None


@dataclass(frozen=True, slots=True)
class Examination:
    """The trials that every rank makes, in the same order. `rows`: the values of all ranks, by kind and dtype."""

    collectives: Collectives
    rank: int
    world_size: int
    small: int
    large_bytes: int
    rows: dict[tuple[Values, torch.dtype], Tensor]

    def run(self, collective: Collective, *, at: Callable[[str], None]) -> list[WrongResult]:
        """All trials of one collective; `at` is told what is about to begin. Collective: yes."""
        if collective is Collective.SEND_RECV and self.world_size == 1:
            return []
        return [fault for trial, rows, name in self._trials(collective) if (fault := self._try(trial, rows, name, at))]

    def _trials(self, collective: Collective) -> Iterator[tuple[Trial, Tensor, str]]:
        for (values, dtype), rows in self.rows.items():
            large = max(1, self.large_bytes // (dtype.itemsize * self.world_size))
            for size, part in (("small", self.small), ("large", large)):
                yield Trial(collective, values, part), rows, f"{values} {str(dtype).removeprefix('torch.')}, {size}"

    def _try(self, trial: Trial, rows: Tensor, name: str, at: Callable[[str], None]) -> WrongResult | None:
        at(name)
        received = self._call(trial, give(trial, rows, rank=self.rank))
        right = answer(trial, rows, rank=self.rank)
        wrong = compare(trial, received, right, rank=self.rank, world_size=self.world_size)
        if wrong is None:
            return None
        text = f"{wrong.num} of {received.numel()} elements ({name}), the first at {wrong.index}: {wrong.got:g}"
        return WrongResult(f"{text} instead of {wrong.expected:g}", wrong.source)

    def _call(self, trial: Trial, given: Tensor) -> Tensor:
        match trial.collective:
            case Collective.ALL_REDUCE:
                self.collectives.all_reduce(given)
                return given
            case Collective.BROADCAST:
                self.collectives.broadcast(given, root=root(trial, world_size=self.world_size))
                return given
            case Collective.ALL_GATHER:
                output = _untouched(given, self.world_size * trial.part)
                self.collectives.all_gather(output, given)
            case Collective.REDUCE_SCATTER:
                output = _untouched(given, trial.part)
                self.collectives.reduce_scatter(output, given)
            case Collective.ALL_TO_ALL:
                output = _untouched(given, len(given))
                self.collectives.all_to_all(output, given)
            case Collective.SEND_RECV:
                output = _untouched(given, len(given))
                before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
                self.collectives.send_recv(output, given, source=before, target=after)
        return output


def make_examination(
    collectives: Collectives, *, rank: int, world_size: int, device: torch.device, options: GroupOptions, full: bool
) -> Examination:
    """Makes the values, too."""
    rows = {
        (values, dtype): table(values, dtype, world_size=world_size, seed=options.seed).to(device)
        for dtype in DTYPES
        for values in Values
    }
    large_bytes = options.large_bytes(cuda=device.type == "cuda", full=full)
    return Examination(collectives, rank, world_size, options.small, large_bytes, rows)


def _untouched(like: Tensor, num: int) -> Tensor:
    # What nobody writes to must not look right by accident.
    return torch.full((num,), float("nan"), dtype=like.dtype, device=like.device)
