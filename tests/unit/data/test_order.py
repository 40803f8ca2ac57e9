from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.data.assignment import sample_at
from tests.unit.examples import examples

SEEDS = st.integers(0, 2**63 - 1)


def epoch_of(epoch: int, *, size: int, seed: int) -> list[int]:
    return [sample_at(epoch * size + offset, num_samples=size, seed=seed, shuffle=True) for offset in range(size)]


def test_frozen_for_ever() -> None:
    # A change of these numbers changes the order of every run that is under way: never adapt them.
    assert epoch_of(0, size=10, seed=0) == [4, 0, 3, 6, 9, 8, 2, 5, 1, 7]
    assert epoch_of(1, size=10, seed=0) == [5, 0, 8, 2, 3, 9, 4, 6, 1, 7]
    positions = (0, 1, 10**9 + 6, 10**9 + 7, 2**50)
    assert [sample_at(p, num_samples=10**9 + 7, seed=2**63 - 1, shuffle=True) for p in positions] == [
        652594260,
        860210673,
        704957390,
        203876430,
        696858034,
    ]


@settings(max_examples=examples(50))
@given(size=st.integers(1, 300), epoch=st.integers(0, 10**6), seed=SEEDS)
def test_each_epoch_visits_each_sample_once(size: int, epoch: int, seed: int) -> None:
    assert sorted(epoch_of(epoch, size=size, seed=seed)) == list(range(size))


@settings(max_examples=examples(30))
@given(size=st.integers(30, 200), epoch=st.integers(0, 1000), seed=SEEDS)
def test_epochs_and_seeds_differ(size: int, epoch: int, seed: int) -> None:
    order = epoch_of(epoch, size=size, seed=seed)
    assert order != epoch_of(epoch + 1, size=size, seed=seed)
    assert order != epoch_of(epoch, size=size, seed=seed ^ 1)
    assert order != list(range(size))


@given(position=st.integers(0, 2**60), size=st.integers(1, 2**50))
def test_without_shuffling_samples_come_in_file_order(position: int, size: int) -> None:
    assert sample_at(position, num_samples=size, seed=3, shuffle=False) == position % size


@given(position=st.integers(0, 2**70), size=st.integers(1, 2**62), seed=SEEDS)
def test_large_sizes_stay_in_range(position: int, size: int, seed: int) -> None:
    assert 0 <= sample_at(position, num_samples=size, seed=seed, shuffle=True) < size


def test_samples_are_spread_evenly_over_places() -> None:
    size, epochs = 16, 800
    counts = [[0] * size for _ in range(size)]
    for epoch in range(epochs):
        for place, sample in enumerate(epoch_of(epoch, size=size, seed=7)):
            counts[place][sample] += 1
    expected = epochs / size
    chi_square = sum((count - expected) ** 2 / expected for row in counts for count in row)
    # 225 degrees of freedom: mean 225, standard deviation 21.
    assert 225 - 5 * 21 < chi_square < 225 + 5 * 21


def test_neighbours_are_not_correlated() -> None:
    order = epoch_of(0, size=4096, seed=1)
    steps = [abs(later - earlier) for earlier, later in pairwise(order)]
    # Two independent uniform places are a third of the range apart on average.
    assert abs(sum(steps) / len(steps) / 4096 - 1 / 3) < 0.02
