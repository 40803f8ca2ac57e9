import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from elastictrain.data.assignment import Share, passes
from elastictrain.data.dataset import Batch, Dataset
from elastictrain.data.loader import Loader, MicroBatch
from elastictrain.data.samples import SampleReader


@dataclass
class Numbers:
    """Sample i is {"x": [i, i * i]}; asking for `broken` fails."""

    size: int = 20
    broken: int = -1
    reads: int = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Batch:
        self.reads += 1
        if index == self.broken:
            raise KeyError("no such picture")
        return {"x": torch.tensor([index, index * index])}


def loader(dataset: Dataset, *, first_step: int = 0, last_step: int = 6, rank: int = 0, prefetch: int = 2) -> Loader:
    share = Share(global_batch=7, micro_batch=2, world_size=2, rank=rank)
    planned = passes(first_step, last_step=last_step, share=share, num_samples=len(dataset), seed=1, shuffle=True)
    return Loader(SampleReader(dataset), planned, workers=0, prefetch=prefetch)


def contents(batches: list[MicroBatch]) -> list[object]:
    return [(one.step, one.portion, one.sample_ids, one.batch["x"].tolist()) for one in batches]


def test_yields_the_plan() -> None:
    with loader(Numbers(), rank=1) as batches:
        found = list(batches)
    share = Share(global_batch=7, micro_batch=2, world_size=2, rank=1)
    planned = list(passes(0, last_step=6, share=share, num_samples=20, seed=1, shuffle=True))
    assert [(one.step, one.portion, one.sample_ids) for one in found] == [
        (one.step, one.portion, one.sample_ids) for one in planned
    ]
    for one in found:
        assert one.batch["x"].tolist() == [[i, i * i] for i in one.sample_ids]


@pytest.mark.parametrize("first_step", range(7))
def test_starting_later_is_skipping(first_step: int) -> None:
    with loader(Numbers()) as whole, loader(Numbers(), first_step=first_step) as rest:
        assert contents(list(rest)) == contents([one for one in whole if one.step >= first_step])


def test_errors_arrive_where_they_stand_and_name_the_sample() -> None:
    with loader(Numbers()) as good:
        planned = list(good)
    broken = planned[5].sample_ids[0]
    healthy = next(number for number, one in enumerate(planned) if broken in one.sample_ids)
    with loader(Numbers(broken=broken)) as batches:
        for _ in range(healthy):
            next(batches)
        for _ in range(2):
            with pytest.raises(KeyError, match="picture") as caught:
                next(batches)
    (note,) = set(caught.value.__notes__)
    position = planned[healthy].portion.first + planned[healthy].sample_ids.index(broken)
    assert f"sample {broken}, at position {position}" in note
    assert "Numbers.__getitem__" in note


def test_reads_ahead_but_not_more_than_told() -> None:
    dataset = Numbers()
    with loader(dataset, prefetch=3):
        deadline = time.monotonic() + 5
        while dataset.reads < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        # Three wait to be taken and one waits for room, two samples each.
        assert dataset.reads == 8


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    batches = loader(Numbers(), last_step=10**9)
    next(batches)
    assert threading.active_count() == before + 1
    started = time.monotonic()
    batches.close()
    batches.close()
    assert time.monotonic() - started < 1
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_a_loader_that_was_never_used_can_be_closed() -> None:
    batches = loader(Numbers())
    batches.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_nothing_left_to_read() -> None:
    with loader(Numbers(), first_step=6) as batches:
        assert list(batches) == []
        assert list(batches) == []


@dataclass
class Threads(Numbers):
    """Remembers who reads."""

    readers: set[int] = field(default_factory=set)

    def __getitem__(self, index: int, /) -> Batch:
        self.readers.add(threading.get_ident())
        return super().__getitem__(index)


@pytest.mark.parametrize("seed", [None, 5])
def test_samples_that_may_draw_are_read_by_the_trainer_itself(seed: int | None) -> None:
    """A thread would draw from the generators of the trainer while that draws, too."""
    dataset, share = Threads(), Share(global_batch=7, micro_batch=2, world_size=2, rank=0)
    planned = passes(0, last_step=6, share=share, num_samples=20, seed=1, shuffle=True)
    with Loader(SampleReader(dataset, seed=seed), planned, workers=0, prefetch=2) as batches:
        found = contents(list(batches))
    assert (dataset.readers == {threading.get_ident()}) == (seed is not None)
    with loader(Numbers()) as others:
        assert found == contents(list(others))


def test_a_read_that_is_interrupted_is_not_used() -> None:
    class Interrupting(Numbers):
        def __getitem__(self, index: int, /) -> Batch:
            batches.interrupt()
            return super().__getitem__(index)

    share = Share(global_batch=7, micro_batch=2, world_size=2, rank=0)
    planned = passes(0, last_step=6, share=share, num_samples=20, seed=1, shuffle=True)
    batches = Loader(SampleReader(Interrupting(), seed=1), planned, workers=0, prefetch=2)
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    assert batches.release() is None
