import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from elastictrain.errors import ConfigError
from elastictrain.train.initial_weights import load_initial_weights
from tests.unit.train.parts import Squares, wrapped_model
from tests.unit.train.test_step import full

NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")


def values(*, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {name: one.shape for name, one in Squares().build_model().named_parameters()}
    return {name: torch.randn(shapes[name], generator=torch.Generator().manual_seed(7)).to(dtype) for name in NAMES}


class Adapted(Squares):
    """Its tensors have other names elsewhere, and the head is not there."""

    def initial_name(self, name: str, stored: frozenset[str]) -> str | None:
        assert stored
        return None if name.startswith("head") else f"base.{name}"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_in_several_files(group_of_one: dist.HashStore, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    stored = values(dtype=dtype)
    save_file(
        {name: stored[name] for name in NAMES[:2]} | {"more": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors"
    )
    save_file({name: stored[name] for name in NAMES[2:]}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model = wrapped_model(Squares(), kind=kind).bare
    assert load_initial_weights(str(tmp_path), model, Squares()) == 1
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(full(parameter), stored[name].float()), name


def test_the_task_maps_names_and_what_it_leaves_out_stays(tmp_path: Path) -> None:
    stored, model = values(), Squares().build_model()
    save_file({f"base.{name}": value for name, value in stored.items()}, tmp_path / "model.safetensors")
    before = model.get_parameter("head.weight").detach().clone()
    assert load_initial_weights(str(tmp_path), model, Adapted()) == 2
    assert torch.equal(model.get_parameter("body.weight"), stored["body.weight"])
    assert torch.equal(model.get_parameter("head.weight"), before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"body.bias": None}, ["body.bias is not there"]),
        ({"body.bias": torch.ones(7), "head.bias": None}, ["body.bias has the shape", "head.bias is not there"]),
    ],
)
def test_a_mismatch_names_all_tensors_and_changes_none(
    tmp_path: Path, change: dict[str, Tensor | None], named: list[str]
) -> None:
    model = Squares().build_model()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    stored = {name: value for name, value in (values() | change).items() if value is not None}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_initial_weights(str(tmp_path), model, Squares())
    (problem,) = caught.value.problems
    assert problem.key == "train.init_from"
    assert all(one in problem.message for one in named)
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


class Twice(Squares):
    def initial_name(self, name: str, stored: frozenset[str]) -> str | None:
        return "both" if "bias" in name else None


def test_two_tensors_cannot_come_from_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
    save_file({"both": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="another"):
        load_initial_weights(str(tmp_path), model, Twice())


@pytest.mark.parametrize("content", [None, b"", struct.pack("<Q", 5) + b"{}", "cut"])
def test_what_cannot_be_read_names_the_key(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "model.safetensors"
    if content == "cut":
        save_file(values(), file)
        file.write_bytes(file.read_bytes()[:-8])
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_initial_weights(str(tmp_path), Squares().build_model(), Squares())
    assert [problem.key for problem in caught.value.problems] == ["train.init_from"]
