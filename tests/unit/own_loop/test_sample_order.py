"""Samples of all ranks together are each epoch's permutation, whatever the world, wherever a run goes on."""

from itertools import islice

import pytest
from torch.utils.data import DataLoader

from elastictrain.errors import ConfigError
from elastictrain.own_loop.sample_order import SampleOrder

SAMPLES, BATCH = 50, 12


def read(monkeypatch: pytest.MonkeyPatch, *, world_size: int, micro_batch: int, first_step: int, steps: int) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    found: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
            monkeypatch.setenv(name, str(value))
        order = SampleOrder(SAMPLES, global_batch=BATCH, micro_batch=micro_batch, seed=3, first_step=first_step)
        loader = DataLoader(range(SAMPLES), batch_sampler=order)  # type: ignore[arg-type]
        for number, batch in enumerate(islice(loader, steps * order.passes_per_step)):
            found[number // order.passes_per_step] += batch.tolist()
    return [sorted(step) for step in found]


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (1, 3), (2, 3), (3, 4), (4, 1), (12, 1)])
def test_every_world_reads_the_same(monkeypatch: pytest.MonkeyPatch, world_size: int, micro_batch: int) -> None:
    alone = read(monkeypatch, world_size=1, micro_batch=BATCH, first_step=1, steps=30)
    assert read(monkeypatch, world_size=world_size, micro_batch=micro_batch, first_step=1, steps=30) == alone
    assert read(monkeypatch, world_size=world_size, micro_batch=micro_batch, first_step=14, steps=17) == alone[13:]
    flat = [one for step in alone for one in step]
    assert len(flat) == 360
    assert all(flat.count(sample) in (7, 8) for sample in range(SAMPLES))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"global_batch": 7}, "global_batch"),
        ({"global_batch": 0}, "global_batch"),
        ({"global_batch": 8, "micro_batch": 3}, "micro_batch"),
        ({"global_batch": 8, "first_step": 0}, "first_step"),
    ],
)
def test_mistakes_name_the_argument(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, int], key: str) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError) as caught:
        SampleOrder(10, **arguments)  # type: ignore[arg-type]
    assert caught.value.problems[0].key == key
