"""A user's own script loads a checkpoint with torch.distributed.checkpoint."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import InvalidCheckpointError
from elastictrain.storage.opening import open_store

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(str(tmp_path))
    options = CheckpointGroup()
    checkpointer = Checkpointer(
        store, options=options, group=None, rank=0, world_size=1, incarnation="i", config_digest="c", record=lambda event: None
    )
    checkpointer.save(1, tensors={"model.weight": WEIGHT, "optim.step": torch.tensor(3.0)}, state={}, reason="step")
    return tmp_path / "checkpoints" / "step-000000001"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flat_and_nested_states_load(folder: Path) -> None:
    flat = {"model.weight": torch.zeros(3, 4)}
    dcp.load(flat, storage_reader=ManifestReader.at(str(folder)))
    assert torch.equal(flat["model.weight"], WEIGHT)
    nested = {"model": {"weight": torch.zeros(3, 4)}, "optim": {"step": torch.tensor(0.0)}}
    dcp.load(nested, storage_reader=ManifestReader.at(str(folder)))
    assert torch.equal(nested["model"]["weight"], WEIGHT)
    assert nested["optim"]["step"].item() == 3.0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damage_is_an_error_that_names_the_file(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + b"?")
    with pytest.raises(CheckpointException, match=r"i-r00000-000\.safetensors"):
        dcp.load({"optim.step": torch.tensor(0.0)}, storage_reader=ManifestReader.at(str(folder)))


def test_a_folder_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"manifest\.json"):
        ManifestReader.at(str(tmp_path)).read_metadata()


def use_a_device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what its stream was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: SimpleNamespace(synchronize=lambda: asked.append("synchronize")))
    return asked


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damaged", [False, True])
def test_copies_that_were_begun_have_ended_however_the_load_ends(
    damaged: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are mapped are copied without waiting, and may be others soon."""
    asked = use_a_device(monkeypatch)
    if damaged:
        (shard,) = folder.glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    flat = {"model.weight": torch.zeros(3, 4), "optim.step": torch.tensor(0.0)}
    with pytest.raises(CheckpointException) if damaged else nullcontext():
        dcp.load(flat, storage_reader=ManifestReader.at(str(folder)))
    assert asked == ["synchronize"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("locks", [True, False])
def test_bytes_for_a_device_go_through_memory_that_is_page_locked_if_it_can_be(
    locks: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def empty(size_bytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        asked.append(size_bytes)
        if not locks:
            raise RuntimeError("exhausted")
        return torch.zeros(size_bytes, dtype=dtype)

    use_a_device(monkeypatch)
    monkeypatch.setattr(torch, "empty", empty)
    flat = {"model.weight": torch.zeros(3, 4)}
    dcp.load(flat, storage_reader=ManifestReader.at(str(folder)))
    assert torch.equal(flat["model.weight"], WEIGHT)
    assert asked
    assert ("exhausted" in caplog.text) is not locks
