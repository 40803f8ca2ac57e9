import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.commands import diff as diff_module
from elastictrain.checkpoint.commands.diff import Difference, compare_manifests, difference
from elastictrain.checkpoint.safetensors_format import BY_NAME
from elastictrain.checkpoint.tensor_bytes import dtype_named
from elastictrain.errors import EXIT_OK, EXIT_STORAGE
from tests.integration.checkpoint.commands.made import flip, manifest_of, save, shard, state_of

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
    a = torch.zeros(3, 1 << 17, dtype=torch.complex64)
    b = a.clone()
    a[0, 0], b[2, 5] = 5j, 3 + 4j
    assert difference(a, b) == Difference(3 << 17, 2, 5.0, 5.0)


EXIT_DIFFERENT = 1


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["diff", str(a), str(b), "--json", *arguments])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return save(tmp_path / "a", 10)


def changed(**changes: Tensor) -> dict[str, Tensor]:
    """The state of step 10 with some tensors replaced; names have underscores for dots."""
    return state_of(10) | {name.replace("_", "."): tensor for name, tensor in changes.items()}


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every tensor of which any part is read."""
    names: list[str] = []
    compare = diff_module.compare_values

    def remember(pairs: Mapping[str, diff_module.TensorPair], **arguments: Any) -> Any:
        names.extend(pairs)
        return compare(pairs, **arguments)

    monkeypatch.setattr(diff_module, "compare_values", remember)
    yield names
    names.sort()


def test_equal_without_reading(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], read_names: list[str]) -> None:
    save(tmp_path / "b", 10)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == EXIT_OK
    assert capsys.readouterr().out.endswith("equal: 5 tensors and the state\n")
    assert read_names == []


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 3), (3, 4)])
@pytest.mark.parametrize("chunk_bytes", [24, 1 << 20])
def test_layouts_do_not_matter(
    worlds: tuple[int, int], dim: int, chunk_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"step": 10}
    a = save(tmp_path / "a", 10, world_size=worlds[0], chunk_bytes=16, state=state)
    b = save(tmp_path / "b", 10, world_size=worlds[1], chunk_bytes=chunk_bytes, dim=dim, state=state)
    assert diff(a, b, capsys)[0] == EXIT_OK
    weight = state_of(10)["model.weight"]
    weight[4, 3] += 0.5
    weight[0, 0] -= 2.0
    c = save(
        tmp_path / "c",
        10,
        world_size=worlds[1],
        chunk_bytes=chunk_bytes,
        dim=dim,
        state=state,
        tensors=changed(model_weight=weight),
    )
    code, found = diff(a, c, capsys)
    assert code == EXIT_DIFFERENT
    assert found["tensors"] == [
        {"name": "model.weight", "elements": 24, "differing": 2, "max_abs": 2.0, "relative": 2.0 / 33.0}
    ]
    assert (found["a"]["world_size"], found["b"]["world_size"]) == worlds


def test_worst_first_and_bounded(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], read_names: list[str]) -> None:
    before = state_of(10)
    nan = before["model.weight"].clone()
    nan[1, 2] = torch.nan
    b = save(
        tmp_path / "b",
        10,
        tensors=before
        | {
            "model.bias": before["model.bias"] * 1.5,
            "model.weight": nan,
            "optim.step": before["optim.step"] + 1,
        },
    )
    code, found = diff(a, b, capsys)
    assert code == EXIT_DIFFERENT
    rows = [(one["name"], one["differing"], one["max_abs"], one["relative"]) for one in found["tensors"]]
    assert rows == [("model.weight", 1, "inf", "inf"), ("model.bias", 5, 5.0, 0.5), ("optim.step", 1, 1.0, 0.1)]
    assert found["differing"] == 3
    assert sorted(read_names) == ["model.bias", "model.weight", "optim.step"], "the others have equal digests"
    _, found = diff(a, b, capsys, "--limit", "1")
    assert [one["name"] for one in found["tensors"]] == ["model.weight"]
    assert found["differing"] == 3
    assert main(["diff", str(a), str(b), "--limit", "2"]) == EXIT_DIFFERENT
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:3] == ["3", "of", "5"]
    assert lines[4].split()[:3] == ["tensor", "elements", "differing"]
    assert [line.split()[0] for line in lines[5:7]] == ["model.weight", "model.bias"]
    assert lines[7].split() == ["and", "1", "more"]


def test_nan_equals_nan_and_minus_zero_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"model.x": torch.tensor([torch.nan, 0.0, 1.0])}
    other = {"model.x": torch.tensor([-torch.nan, -0.0, 1.0])}
    a, b = save(tmp_path / "a", 10, tensors=one), save(tmp_path / "b", 10, tensors=other)
    assert manifest_of(a).tensors != manifest_of(b).tensors
    assert diff(a, b, capsys)[0] == EXIT_OK


def test_tensors_that_cannot_be_compared(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = changed(model_weight=torch.zeros(6, 5), model_bias=torch.full((5,), 10.0), optim_new=torch.ones(2))
    del tensors["optim.count"]
    b = save(tmp_path / "b", 10, tensors=tensors)
    code, found = diff(a, b, capsys)
    assert code == EXIT_DIFFERENT
    assert (found["only_a"], found["only_b"], found["tensors"]) == (["optim.count"], ["optim.new"], [])
    assert found["other_kind"] == [
        {"name": "model.bias", "a": {"dtype": "bfloat16", "shape": [5]}, "b": {"dtype": "float32", "shape": [5]}},
        {"name": "model.weight", "a": {"dtype": "float32", "shape": [6, 4]}, "b": {"dtype": "float32", "shape": [6, 5]}},
    ]
    assert main(["diff", str(a), str(b)]) == EXIT_DIFFERENT
    out = capsys.readouterr().out
    assert "\n  optim.count\n" in out
    assert ["model.bias", "bfloat16", "[5]", "float32", "[5]"] in [line.split() for line in out.splitlines()]


def test_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", 10, state={"step": 10, "deep": {"x": 1, "y": [1]}, "gone": None})
    b = save(tmp_path / "b", 10, state={"step": 10, "deep": {"x": 2, "y": [1]}})
    code, found = diff(a, b, capsys)
    assert code == EXIT_DIFFERENT
    assert found["state"] == {"deep.x": [1, 2], "gone": [None, "(not there)"]}
    assert main(["diff", str(a), str(b)]) == EXIT_DIFFERENT
    assert ["deep.x", "1", "2"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_newest_valid_one_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10)
    shard(save(tmp_path, 20)).unlink()
    save(tmp_path, 30, uncommitted=True)
    code, found = diff(tmp_path, tmp_path / "checkpoints" / "step-000000010", capsys)
    assert code == EXIT_OK
    assert found["a"] == {"url": f"{tmp_path}/checkpoints/step-000000010", "step": 10, "world_size": 1}


def test_damaged_bytes_are_no_difference(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = save(tmp_path / "b", 10, tensors=changed(model_bias=torch.zeros(5, dtype=torch.bfloat16)))
    flip(shard(b))
    assert main(["diff", str(a), str(b)]) == EXIT_STORAGE
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"elastictrain: {shard(b)}: bytes [")


def test_digests_decide_what_is_read(a: Path, tmp_path: Path) -> None:
    halves = save(tmp_path / "b", 10, world_size=2)
    names = list(compare_manifests(manifest_of(a), manifest_of(halves)).to_read)
    assert names == ["model.bias", "model.weight", "optim.count", "optim.exp_avg.weight"], "only the scalar has the same box"
