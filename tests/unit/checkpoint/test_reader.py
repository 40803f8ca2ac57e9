"""A user's own script loads a checkpoint with torch.distributed.checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from elastictrain.checkpoint import reader
from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError
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


class OnDevice(torch.Tensor):
    """As if it were on the device of that number."""

    is_cuda = True  # type: ignore[assignment]


class MappedFiles:
    """A store of which the files that end with `ending` lie in memory of this process."""

    def __init__(self, folder: Path, ending: str) -> None:
        self._whole, self._ending = open_store(str(folder)), ending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def mapped(self, key: str, start: int, end: int) -> memoryview | None:
        if not key.endswith(self._ending):
            return None
        return memoryview(bytearray(self._whole.read(key)))[start:end]


def use_a_device(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns what happens there: the copies, whether each is waited for, and waits for a stream."""
    happened: list[object] = []
    copy_bytes = reader.copy_bytes

    def copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        happened.append("begins" if non_blocking else "copies")
        copy_bytes(target.as_subclass(torch.Tensor), source)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: happened.append(device))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "default_stream", stream)
    monkeypatch.setattr(reader, "copy_bytes", copy)
    return happened


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("ending", "whole", "wanted"),
    [(".safetensors", True, "begins"), (".safetensors", False, "copies"), ("nothing", True, "copies")],
)
def test_bytes_that_stay_are_copied_without_a_wait_for_each_piece(
    ending: str, whole: bool, wanted: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are read into a buffer, which is used again, are waited for."""
    happened = use_a_device(monkeypatch)
    target = torch.zeros(3, 4) if whole else torch.zeros(4, 3).T
    store = MappedFiles(folder, ending)
    dcp.load({"model.weight": on_device(target)}, storage_reader=ManifestReader(CheckpointFolder(store, "")))
    assert torch.equal(target, WEIGHT)
    assert happened == [wanted, target.device]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_copies_that_were_begun_have_ended_also_after_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes may be others soon."""
    happened = use_a_device(monkeypatch)

    def read_chunks(*_: object, take_mapped: Callable[[object, memoryview], None], **__: object) -> int:
        (chunk,) = ManifestReader.at(str(folder)).manifest.tensors["model.weight"].chunks
        take_mapped(chunk, memoryview(bytearray(chunk.size_bytes)))
        happened.append("failed")
        raise DamagedFileError("another chunk")

    monkeypatch.setattr(reader, "read_chunks", read_chunks)
    with pytest.raises(CheckpointException):
        dcp.load({"model.weight": on_device(torch.zeros(3, 4))}, storage_reader=ManifestReader.at(str(folder)))
    assert happened == ["begins", "failed", torch.device("cpu")]


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
