"""Every bit counts, wherever it lies, in any type of tensor."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastictrain.train.replica_comparison import state_digest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
ROW = 4096
"""Words of eight bytes that are added up together."""


def digest_of(tensors: Sequence[Tensor]) -> int:
    return int(state_digest(tensors))


def random_bytes(number: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (number,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def flip(tensor: Tensor, bit: int) -> None:
    content = tensor.view(-1).view(torch.uint8)
    content[bit // 8] ^= 1 << bit % 8


@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 12, 100, 8 * ROW, 8 * ROW + 4, 17 * ROW]), min_size=1, max_size=5).filter(any),
    data=st.data(),
)
def test_the_flip_of_any_bit_is_seen_and_its_return_too(sizes: list[int], data: st.DataObject) -> None:
    tensors = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    before = digest_of(tensors)
    victim = tensors[data.draw(st.sampled_from([place for place, size in enumerate(sizes) if size]))]
    bit = data.draw(st.integers(0, 8 * victim.numel() - 1))
    flip(victim, bit)
    assert digest_of(tensors) != before
    flip(victim, bit)
    assert digest_of(tensors) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_a_type_counts(dtype: torch.dtype) -> None:
    # Odd numbers of elements, none and one: words of eight bytes do not divide them.
    tensors = [torch.zeros(3, dtype=dtype), torch.zeros((), dtype=dtype), torch.zeros(0, dtype=dtype)]
    before = digest_of(tensors)
    for bit in range(8 * 3 * tensors[0].element_size()):
        flip(tensors[0], bit)
        assert digest_of(tensors) != before
        flip(tensors[0], bit)
    flip(tensors[1], 0)
    assert digest_of(tensors) != before


def test_rows_and_tensors_that_change_places_are_seen() -> None:
    one, other = random_bytes(8 * ROW, 1), random_bytes(8 * ROW, 2)
    assert digest_of([one, other]) != digest_of([other, one])
    assert digest_of([torch.cat([one, other])]) != digest_of([torch.cat([other, one])])


def test_the_same_flip_in_two_rows_does_not_cancel() -> None:
    tensor = torch.zeros(2 * ROW, dtype=torch.int64)
    before = digest_of([tensor])
    tensor[0], tensor[ROW] = 1, -1
    assert digest_of([tensor]) != before


def test_where_a_tensor_lies_does_not_matter() -> None:
    content = torch.randn(2 * ROW + 1)
    around = torch.zeros(2 * ROW + 3)
    for offset in range(3):
        placed = around[offset : offset + content.numel()].copy_(content)
        assert digest_of([placed]) == digest_of([content])
    matrix = torch.randn(60, 50)
    assert digest_of([matrix.t()]) == digest_of([matrix.t().contiguous()])


def test_nothing_has_a_digest() -> None:
    assert digest_of([]) == digest_of([torch.zeros(0)]) == 0
