import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.data.samples import derive_seed
from elastictrain.train.parameters import seed_everything

parts = st.lists(
    st.integers() | st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), max_size=4
)


@pytest.mark.parametrize(
    ("what", "seed"),
    [
        ((0, "model"), 3713908160135145785),
        ((17, "micro-batch", 3, 128), 8444441104194452701),
        ((0, "parameter", "layers.0.w"), 6809708048466817818),
        (("1",), 4874322630454220205),
        ((1,), 8992774166669296750),
    ],
)
def test_seeds_never_change(what: tuple[int | str, ...], seed: int) -> None:
    """Another value here would change every run that goes on with a newer version."""
    assert derive_seed(*what) == seed


@given(parts)
def test_seeds_fit_every_generator(what: list[int | str]) -> None:
    seed = derive_seed(*what)
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


@given(parts, parts)
def test_different_purposes_have_different_seeds(one: list[int | str], other: list[int | str]) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_all_generators_are_seeded() -> None:
    def draw() -> tuple[float, float, float]:
        seed_everything(derive_seed(3, "here"))
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    first = draw()
    torch.rand(5)
    assert draw() == first
    seed_everything(derive_seed(4, "here"))
    assert torch.rand(()).item() != first[0]
