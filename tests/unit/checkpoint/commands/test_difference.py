"""How far tensors are apart, for every element type."""

import math

import pytest
import torch

from elastictrain.checkpoint.commands.difference import Difference, difference
from elastictrain.checkpoint.dtypes import BY_NAME
from elastictrain.checkpoint.tensor_bytes import dtype_named

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], Difference(2, 0, 0.0, 2.0)),
        ([1.0, -4.0, 2.0], [1.5, -4.0, 1.0], Difference(3, 2, 1.0, 4.0)),
        ([NAN, 1.0], [NAN, 1.0], Difference(2, 0, 0.0, 1.0)),
        ([NAN, 1.0], [1.0, 1.0], Difference(2, 1, INF, 1.0)),
        ([1.0, 1.0], [NAN, 1.0], Difference(2, 1, INF, 1.0)),
        ([INF, -INF], [INF, -INF], Difference(2, 0, 0.0, 0.0)),
        ([INF, 3.0], [-INF, 3.0], Difference(2, 1, INF, 3.0)),
        ([0.0], [-0.0], Difference(1, 0, 0.0, 0.0)),
        ([], [], Difference(0, 0, 0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floats(a: list[float], b: list[float], expected: Difference, dtype: torch.dtype) -> None:
    assert difference(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)) == expected


def test_relative() -> None:
    assert Difference(4, 1, 0.5, 2.0).relative == 0.25
    assert Difference(4, 1, 0.5, 0.0).relative == INF
    assert Difference(4, 0, 0.0, 0.0).relative == 0.0


@pytest.mark.parametrize("name", BY_NAME)
def test_every_element_type(name: str) -> None:
    one, two = (torch.tensor([1, 0, value], dtype=torch.uint8) for value in (1, 0))
    if name == "float8_e8m0fnu":
        # It has no zero: bytes 0 and 1 are powers of two.
        found = difference(one.view(torch.float8_e8m0fnu), two.view(torch.float8_e8m0fnu))
        assert (found.elements, found.differing) == (3, 1)
        return
    assert difference(one.to(dtype_named(name)), two.to(dtype_named(name))) == Difference(3, 1, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "a", "b", "max_abs", "scale"),
    [
        ("int64", -(2**63), 2**63 - 1, 2.0**64, 2.0**63),
        ("uint64", 2**64 - 1, 0, 2.0**64, 2.0**64),
        ("int8", -128, 127, 255.0, 128.0),
        ("uint8", 0, 255, 255.0, 0.0),
    ],
)
def test_integers_do_not_wrap_around(name: str, a: int, b: int, max_abs: float, scale: float) -> None:
    x, y = (torch.tensor([value], dtype=dtype_named(name)) for value in (a, b))
    assert difference(x, y) == Difference(1, 1, max_abs, scale)


def test_complex_numbers_and_more_elements_than_are_widened_at_once() -> None:
    a = torch.zeros(3, 1 << 20, dtype=torch.complex64)
    b = a.clone()
    a[0, 0], b[2, 5] = 5j, 3 + 4j
    assert difference(a, b) == Difference(3 << 20, 2, 5.0, 5.0)
