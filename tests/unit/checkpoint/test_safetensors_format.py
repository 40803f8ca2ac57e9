import itertools
import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from elastictrain.checkpoint.safetensors_format import BY_NAME, HeaderEntry, decode_header, encode_header
from elastictrain.checkpoint.tensor_bytes import dtype_named
from elastictrain.errors import InvalidCheckpointError


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_safetensors_package_reads_it(name: str) -> None:
    element = BY_NAME[name]
    data = bytes(range(6 * element.size_bytes)) if name != "bool" else bytes([0, 1, 1, 0, 0, 1])
    entries = [("a", name, (2, 3)), ("empty", name, (0, 3))]
    if name == "float8_e8m0fnu":
        pytest.skip("the package's torch loader does not know it")
    tensors = load(encode_header(entries, metadata={"format": "pt"}) + data)
    assert tensors["a"].dtype == dtype_named(name)
    assert tensors["a"].itemsize == element.size_bytes
    assert torch.equal(tensors["a"].reshape(-1).view(torch.uint8), torch.tensor(list(data), dtype=torch.uint8))
    assert tensors["empty"].shape == (0, 3)


@given(st.dictionaries(st.text(max_size=20), st.integers(0, 100), max_size=5))
def test_header_round_trip_and_alignment(sizes: dict[str, int]) -> None:
    sizes.pop("__metadata__", None)
    head = encode_header([(key, "uint8", (size,)) for key, size in sizes.items()], metadata={"step": "3"})
    assert len(head) % 8 == 0
    ends = list(itertools.accumulate(sizes.values()))
    expected = {
        key: HeaderEntry("U8", (size,), (end - size, end)) for (key, size), end in zip(sizes.items(), ends, strict=True)
    }
    assert decode_header(head, where="f") == expected


@given(st.binary(max_size=60))
def test_garbage_raises_nothing_else(data: bytes) -> None:
    with suppress(InvalidCheckpointError):
        decode_header(data, where="f")


def test_unknown_type() -> None:
    text = json.dumps({"a": {"dtype": "X1", "shape": [], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(InvalidCheckpointError, match="X1"):
        decode_header(len(text).to_bytes(8, "little") + text, where="f")
