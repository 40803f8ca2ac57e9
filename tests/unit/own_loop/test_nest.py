"""Nests are stored without pickle, and come back as they were."""

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastictrain.bounded_json import encode_record, parse_json
from elastictrain.own_loop.nest import UnknownValueError, put_together, take_apart

KEYS = st.text(max_size=4) | st.integers(-9, 99) | st.just("$")
LEAVES = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=5)
NESTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner)
)


def back(value: object) -> Any:
    tensors: dict[str, Tensor] = {}
    document = take_apart(value, "x", tensors)
    return put_together(parse_json(encode_record(document)), tensors)


@given(NESTS)
def test_a_nest_comes_back(value: object) -> None:
    assert back(value) == value


def test_tensors_have_their_path_as_name() -> None:
    tensors: dict[str, Tensor] = {}
    one, other = torch.ones(2), torch.zeros(())
    document = take_apart({"a": [one], 3: {"b": other}}, "x", tensors)
    assert list(tensors) == ["x.a.0", "x.3.b"]
    assert put_together(document, tensors) == {"a": [one], 3: {"b": other}}


def test_numbers_that_json_does_not_have() -> None:
    assert math.isnan(back(math.nan))
    assert back([math.inf, -math.inf, numpy.float64(2.5), numpy.int64(3)]) == [math.inf, -math.inf, 2.5, 3]


@pytest.mark.parametrize("value", [{"f": print}, [object()], {1.5: 2}, b"bytes", {"s": {1, 2}}])
def test_what_needs_pickle_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(UnknownValueError, match="`x"):
        take_apart(value, "x", {})
