import random
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastictrain.data.assignment import Share, passes
from elastictrain.data.dataset import leaves, map_tensors
from elastictrain.data.samples import SampleReader
from elastictrain.errors import TaskError

Pair = namedtuple("Pair", "x y")


@dataclass
class Drawing:
    """A sample is its index and what each generator gives."""

    size: int = 12

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Tensor:
        own = np.random.default_rng(random.getrandbits(64))
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand(), own.random()])


@dataclass
class Given:
    samples: list[Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> Any:
        return self.samples[index]


def by_position(*, world_size: int, micro_batch: int, seed: int = 3) -> dict[int, list[float]]:
    """What was read at each position of six steps, by all ranks."""
    found = {}
    reader = SampleReader(Drawing(), seed=seed)
    for rank in range(world_size):
        share = Share(6, micro_batch, world_size, rank)
        for one in passes(0, last_step=6, share=share, num_samples=12, seed=0, shuffle=True):
            batch: Any = reader.read(one.sample_ids, first=one.portion.first)
            found |= {one.portion.first + index: row for index, row in enumerate(batch.tolist())}
    return found


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 4), (2, 2), (3, 4), (4, 3)])
def test_a_position_has_the_same_sample_on_any_world(world_size: int, micro_batch: int) -> None:
    right = by_position(world_size=1, micro_batch=6)
    assert sorted(right) == list(range(36))
    assert by_position(world_size=world_size, micro_batch=micro_batch) == right


def test_each_epoch_and_each_seed_draws_anew() -> None:
    rows = by_position(world_size=1, micro_batch=6)
    for place in range(1, 5):
        assert len({row[place] for row in rows.values()}) == 36
    others = by_position(world_size=1, micro_batch=6, seed=4)
    assert all(rows[position][place] != others[position][place] for position in rows for place in range(1, 5))


def test_collate_draws_by_the_first_position_whatever_the_samples_drew() -> None:
    def collate(samples: list[Any]) -> Any:
        return [torch.stack(samples), torch.rand(3), random.random()]

    drawing, quiet = SampleReader(Drawing(), collate, 3), SampleReader(Given([torch.ones(1)] * 12), collate, 3)
    first, other, later = drawing.read([1, 2], first=4), quiet.read([1, 2], first=4), quiet.read([1, 2], first=6)
    assert torch.equal(first[1], other[1])  # type: ignore[index]
    assert first[2] == other[2] != later[2]  # type: ignore[index]


def test_without_a_seed_no_generator_is_touched() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    SampleReader(Given([torch.ones(2)])).read([0], first=5)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_dataset_that_imports_numpy_when_it_reads_draws_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_random = np.random

    class Importing(Drawing):
        def __getitem__(self, index: int, /) -> Tensor:
            sys.modules["numpy.random"] = numpy_random
            return super().__getitem__(index)

    right = SampleReader(Drawing(), seed=1).read([7], first=2)
    np.random.seed(99)
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert torch.equal(SampleReader(Importing(), seed=1).read([7], first=2), right)  # type: ignore[arg-type]


def test_nests_of_tensors_arrays_and_numbers_are_stacked() -> None:
    samples = [
        Pair({"a": torch.full((2,), i), "b": [np.full(3, i, np.float32), np.int64(i)]}, (i, float(i), i > 0, "text"))
        for i in range(2)
    ]
    batch: Any = SampleReader(Given(samples)).read([0, 1], first=0)
    assert isinstance(batch, Pair)
    assert batch.x["a"].tolist() == [[0, 0], [1, 1]]
    array, number = batch.x["b"]
    assert (array.dtype, array.shape, number.dtype, number.tolist()) == (torch.float32, (2, 3), torch.int64, [0, 1])
    whole, real, truth, text = batch.y
    assert (whole.dtype, real.dtype, truth.dtype, text) == (torch.int64, torch.float32, torch.bool, ["text", "text"])
    doubled: Any = map_tensors(batch, lambda tensor: tensor * 2 if tensor.dtype != torch.bool else tensor)
    assert isinstance(doubled, Pair)
    assert doubled.x["a"].tolist() == [[0, 0], [2, 2]]
    assert len([one for one in leaves(doubled) if isinstance(one, Tensor)]) == 6


@pytest.mark.parametrize(
    "other", [torch.ones(4), torch.ones(3, dtype=torch.float64), np.ones(3, np.float32), [1.0], {"x": 1}, None], ids=repr
)
def test_samples_that_differ_are_named_by_position(other: object) -> None:
    with pytest.raises(TaskError) as caught:
        SampleReader(Given([torch.ones(3), torch.ones(3), other])).read([0, 1, 2], first=40)
    assert (caught.value.method, caught.value.position) == ("Given.__getitem__", 42)
