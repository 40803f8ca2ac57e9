from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastictrain.config.composed import SourceGroup
from elastictrain.data.assignment import Share, passes, sample_at
from elastictrain.data.dataset import Batch
from elastictrain.data.mixture import MixedDataset, Mixture, make_mixture, pattern_of, proportions
from elastictrain.errors import ConfigError
from tests.unit.examples import examples

WEIGHTS = st.lists(st.one_of(st.integers(1, 40).map(float), st.sampled_from([0.1, 0.25, 7.3])), min_size=1, max_size=5)
SEED = 2**63 - 1


def mixed(*weights: object, sizes: list[int] | None = None, global_batch: int = 8) -> Mixture:
    sources = [SourceGroup(f"s{number}", weight) for number, weight in enumerate(weights)]  # type: ignore[arg-type]
    return make_mixture(sources, sizes=sizes or [10] * len(weights), global_batch=global_batch)


def drawn(mixture: Mixture, positions: range) -> Counter[int]:
    return Counter(mixture.locate(position)[0] for position in positions)


def test_frozen_for_ever() -> None:
    # A change of these numbers changes the order of every run that is under way: never adapt them.
    mixture = mixed(3.0, 1.0, sizes=[5, 4])
    assert [mixture.locate(position) for position in range(8)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (0, 4), (0, 5), (1, 1),
    ]  # fmt: skip
    assert [mixture.sample_at(position, seed=0, shuffle=True) for position in range(8)] == [4, 2, 3, 7, 0, 1, 0, 8]
    far = mixed(0.7, 0.2, 0.1, sizes=[10**9, 10**6, 7])
    assert [far.sample_at(position, seed=SEED, shuffle=True) for position in (0, 2**40, 2**40 + 1)] == [
        652594260,
        1000360705,
        637899517,
    ]


@settings(max_examples=examples(60))
@given(weights=WEIGHTS)
def test_each_prefix_has_the_weights_to_within_one_sample(weights: list[float]) -> None:
    counts = proportions(weights, step=0)
    period = sum(counts)
    # Exact, so nothing adds up however long the run is.
    assert [count * sum(weights) for count in counts] == pytest.approx([weight * period for weight in weights])
    seen = [0] * len(weights)
    for position, (source, before) in enumerate(pattern_of(counts), 1):
        assert before == seen[source]
        seen[source] += 1
        assert all(abs(seen[one] * period - counts[one] * position) < period for one in range(len(weights)))
    assert tuple(seen) == counts


@settings(max_examples=examples(40))
@given(weights=WEIGHTS, batch=st.integers(1, 64), step=st.integers(0, 10**6), steps=st.integers(1, 4))
def test_any_window_of_steps_has_the_weights(weights: list[float], batch: int, step: int, steps: int) -> None:
    mixture = mixed(*weights, global_batch=batch)
    positions = range(step * batch, (step + steps) * batch)
    counts = drawn(mixture, positions)
    for source, weight in enumerate(weights):
        assert abs(counts[source] - weight / sum(weights) * len(positions)) < 2 + 1e-6
    if len(weights) <= 2:
        assert all(abs(counts[one] / len(positions) - weight / sum(weights)) <= 1 / batch for one, weight in enumerate(weights))


CURRICULUM = st.lists(
    st.dictionaries(st.integers(1, 30), st.sampled_from([0.0, 1.0, 2.0, 0.3]), max_size=3).map(
        lambda later: tuple(sorted({0: 1.0, **later}.items()))
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(60))
@given(
    weights=CURRICULUM,
    sizes=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    seed=st.integers(0, SEED),
    batch=st.integers(1, 9),
)
def test_each_source_is_visited_once_per_epoch(
    weights: list[tuple[tuple[int, float], ...]], sizes: list[int], seed: int, batch: int
) -> None:
    sizes = sizes[: len(weights)]
    try:
        mixture = mixed(*weights, sizes=sizes, global_batch=batch)
    except ConfigError:
        assume(False)
    seen: list[list[int]] = [[] for _ in sizes]
    for position in range(40 * batch):
        source, draw = mixture.locate(position)
        assert draw == len(seen[source])
        sample = mixture.sample_at(position, seed=seed, shuffle=True) - sum(sizes[:source])
        assert 0 <= sample < sizes[source]
        seen[source].append(sample)
    for size, samples in zip(sizes, seen, strict=True):
        for begin in range(0, len(samples) - size + 1, size):
            assert sorted(samples[begin : begin + size]) == list(range(size))


@settings(max_examples=examples(40))
@given(step=st.integers(0, 60), world=st.integers(1, 5), micro=st.integers(1, 4))
def test_any_world_continues_anywhere_with_the_same_samples(step: int, world: int, micro: int) -> None:
    mixture = mixed(((0, 3.0), (7, 1.0)), 1.0, ((0, 0.0), (11, 0.5)), sizes=[50, 9, 4], global_batch=12)
    options = {"num_samples": 63, "seed": 3, "shuffle": True, "mixture": mixture}
    found = {}
    for rank in range(world):
        for one in passes(step, last_step=step + 2, share=Share(12, micro, world, rank), **options):  # type: ignore[arg-type]
            if one.portion.counts:
                found |= dict(zip(range(one.portion.first, one.portion.end), one.sample_ids, strict=True))
    assert found == {p: mixture.sample_at(p, seed=3, shuffle=True) for p in range(step * 12, step * 12 + 24)}


def test_weights_change_at_their_step() -> None:
    mixture = mixed(((0, 1.0), (3, 0.0), (5, 2.0)), ((0, 0.0), (3, 1.0)), global_batch=6)
    each = [drawn(mixture, range(step * 6, step * 6 + 6)) for step in range(6)]
    assert each == [{0: 6}, {0: 6}, {0: 6}, {1: 6}, {1: 6}, {0: 4, 1: 2}]


def test_weights_too_fine_for_a_pattern_are_rounded() -> None:
    counts = proportions([0.123456789, 0.876543211], step=0)
    assert sum(counts) == 2**16
    assert abs(counts[0] / 2**16 - 0.123456789) < 2**-16


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        ([0.0, 0.0], "data.sources"),
        ([((0, 1.0), (4, 0.0)), ((0, 1.0), (4, 0.0))], "data.sources"),
        ([1.0, ((1, 1.0),)], "data.sources[1].weight"),
        ([((0, 1.0), (5, 2.0), (5, 3.0))], "data.sources[0].weight"),
        ([((0, 1.0), (5, 2.0), (3, 3.0))], "data.sources[0].weight"),
        ([()], "data.sources[0].weight"),
        ([1.0, 1e-7], "data.sources[1].weight"),
    ],
)
def test_weights_that_are_refused(weights: list[object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(*weights)
    assert [problem.key for problem in caught.value.problems] == [key]


class Numbers:
    def __init__(self, first: int, size: int) -> None:
        self.values = range(first, first + size)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int, /) -> Batch:
        return {"x": torch.tensor(self.values[index])}


def test_samples_in_a_row_and_in_turn() -> None:
    parts = [Numbers(0, 3), Numbers(10, 3)]
    assert [int(MixedDataset(parts)[i]["x"]) for i in range(6)] == [0, 1, 2, 10, 11, 12]
    assert [int(MixedDataset(parts, in_turn=True)[i]["x"]) for i in range(6)] == [0, 10, 1, 11, 2, 12]
    assert len(MixedDataset([Numbers(0, 0), *parts])) == 6
    assert int(MixedDataset([Numbers(0, 0), *parts])[0]["x"]) == 0
    with pytest.raises(IndexError):
        MixedDataset(parts)[6]


def test_one_source_keeps_its_own_order() -> None:
    assert all(
        mixed(5.0).sample_at(p, seed=9, shuffle=True) == sample_at(p, num_samples=10, seed=9, shuffle=True) for p in range(30)
    )
