"""`export` through the command line; what it wrote is read back with the tools that it is for."""

import errno
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.commands.export_formats import (
    ExportSource,
    folder_target,
    plan_shards,
    write_safetensors,
)
from elastictrain.checkpoint.commands.survey import find_checkpoint, locate
from elastictrain.errors import EXIT_CONFIG, EXIT_OK, EXIT_STORAGE, EXIT_UNFIT, EXIT_USAGE
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import flip, save, shard, state_of

NO_GROUP = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EXPORTING = "tests.integration.checkpoint.commands.tasks.ExportingTask"
FORMATS = ("torch", "safetensors", "dcp", "hf")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 and 20, saved by three ranks."""
    run = tmp_path / "run"
    for step in (10, 20):
        save(run, step, world_size=3, chunk_bytes=20)
    configure(run, EXPORTING)
    return run


def configure(run: Path, target: str, more: str = "") -> None:
    (run / "config.yaml").write_text(f"task:\n  _target_: {target}\n{more}")


def export(run: Path, to: str, out: object, *arguments: str, task: str = EXPORTING) -> int:
    return main(["export", str(run), str(out), "--to", to, *(("--task", task) if to == "hf" and task else ()), *arguments])


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def flattened(loaded: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{family}.{name}": tensor for family in ("model", "optim") for name, tensor in loaded[family].items()}


def as_dtype(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if name.startswith("model.") else tensor for name, tensor in state.items()}


def test_torch(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run, "torch", tmp_path / "deep" / "out.pt") == EXIT_OK
    loaded = torch.load(tmp_path / "deep" / "out.pt", weights_only=True)
    assert_same(flattened(loaded), state_of(20))
    assert set(loaded) == {"model", "optim", "elastictrain"}
    facts = loaded["elastictrain"]
    assert (facts["step"], facts["world_size"], facts["state"]) == (20, 3, {"step": 20, "data_digest": "d"})
    assert "step 20" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_element_type_of_the_model(dtype: str, run: Path, tmp_path: Path) -> None:
    expected = as_dtype(state_of(20), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    assert export(run, "torch", tmp_path / "out.pt", "--dtype", dtype) == EXIT_OK
    assert_same(flattened(torch.load(tmp_path / "out.pt", weights_only=True)), expected)
    assert export(run, "safetensors", tmp_path / "out", "--dtype", dtype) == EXIT_OK
    assert_same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_safetensors(run: Path, tmp_path: Path) -> None:
    assert export(run, "safetensors", tmp_path / "out", "--step", "10") == EXIT_OK
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "model.safetensors"
    assert_same(safetensors.torch.load_file(file), state_of(10))
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "10"}


def test_safetensors_of_several_files(run: Path, tmp_path: Path) -> None:
    found = find_checkpoint(locate(str(run)))
    source = ExportSource(found, None, advance=lambda _: None)
    write_safetensors(source, folder_target(f"{tmp_path}/out"), shard_bytes=120)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert names == set(index["weight_map"].values())
    assert names == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    loaded: dict[str, Tensor] = {}
    for name in names:
        content = safetensors.torch.load_file(tmp_path / "out" / name)
        assert {index["weight_map"][key] for key in content} == {name}
        loaded |= content
    assert_same(loaded, state_of(20))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())


def test_shards_are_filled_in_order_and_never_cut_a_tensor() -> None:
    assert plan_shards({"a": 5}, shard_bytes=3) == {"model.safetensors": ["a"]}
    assert list(plan_shards({"a": 5, "b": 1, "c": 2, "d": 1}, shard_bytes=3).values()) == [["a"], ["b", "c"], ["d"]]
    assert plan_shards({}, shard_bytes=3) == {"model.safetensors": []}


@NO_GROUP
def test_dcp(run: Path, tmp_path: Path) -> None:
    assert export(run, "dcp", tmp_path / "out") == EXIT_OK
    blank = {name: torch.zeros_like(tensor) for name, tensor in state_of(20).items()}
    dcp.load(blank, storage_reader=FileSystemReader(tmp_path / "out"))
    assert_same(blank, state_of(20))
    nested = {"model": {"weight": torch.zeros(6, 4)}}
    dcp.load(nested, storage_reader=FileSystemReader(tmp_path / "out"))
    assert torch.equal(nested["model"]["weight"], state_of(20)["model.weight"])
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    assert_same(flattened(loaded), state_of(20))
    assert loaded["elastictrain"]["state"] == {"step": 20, "data_digest": "d"}


@NO_GROUP
def test_to_an_object_store(run: Path, tmp_path: Path) -> None:
    for to in ("dcp", "safetensors"):
        assert export(run, to, f"memory://exports-{tmp_path.name}/{to}") == EXIT_OK
    assert export(run, "torch", f"memory://exports-{tmp_path.name}/one.pt") == EXIT_OK
    store = open_store(f"memory://exports-{tmp_path.name}")
    keys = [info.key for info in store.list()]
    assert keys == ["dcp/.metadata", "dcp/__0_0.distcp", "one.pt", "safetensors/model.safetensors"]
    for key in keys:
        target = tmp_path / "back" / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.read(key))
    dcp_to_torch_save(tmp_path / "back" / "dcp", tmp_path / "out.pt")
    assert_same(flattened(torch.load(tmp_path / "out.pt", weights_only=False)), state_of(20))
    assert_same(flattened(torch.load(tmp_path / "back" / "one.pt", weights_only=True)), state_of(20))
    assert_same(safetensors.torch.load_file(tmp_path / "back" / "safetensors" / "model.safetensors"), state_of(20))


@pytest.mark.parametrize(("arguments", "dtype"), [((), "torch.bfloat16"), (("--dtype", "fp32"), "torch.float32")])
def test_hugging_face_is_the_task_s_business(arguments: tuple[str, ...], dtype: str, run: Path, tmp_path: Path) -> None:
    configure(run, EXPORTING, "  width: 7\n")
    assert export(run / "checkpoints" / "step-000000010", "hf", tmp_path / "out", *arguments) == EXIT_OK
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "width": 7,
        "dtype": dtype,
        "sums": {"weight": [dtype, 516.0], "bias": [dtype, 50.0]},
        "shapes": {"weight": [6, 4], "bias": [5]},
        "url": f"{run}/checkpoints/step-000000010",
    }


def test_the_averages_of_the_weights_are_exported(run: Path, tmp_path: Path) -> None:
    """A frozen parameter has none."""
    tensors = state_of(30) | {"ema.weight": torch.full((6, 4), 0.25)}
    save(run, 30, tensors=tensors)
    assert export(run, "hf", tmp_path / "out") == EXIT_OK
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["sums"] == {"weight": ["torch.bfloat16", 6.0], "bias": ["torch.bfloat16", 150.0]}
    assert found["shapes"] == {"weight": [6, 4], "bias": [5]}
    assert export(run, "safetensors", tmp_path / "all") == EXIT_OK
    assert_same(safetensors.torch.load_file(tmp_path / "all" / "model.safetensors"), tensors)


@pytest.mark.parametrize(
    ("task", "more", "code", "says"),
    [
        (
            "tests.integration.checkpoint.commands.tasks.PlainTask",
            "",
            EXIT_USAGE,
            "export_huggingface",
        ),
        ("nowhere.Task", "", EXIT_USAGE, "nowhere"),
        ("", "", EXIT_USAGE, f"--task {EXPORTING}"),
        (EXPORTING, "  depth: 3\n", EXIT_CONFIG, "`task.depth`"),
        (EXPORTING, "  width: wide\n", EXIT_CONFIG, "`task.width`"),
    ],
)
def test_tasks_that_cannot(
    task: str, more: str, code: int, says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(run, EXPORTING, more)
    assert export(run, "hf", tmp_path / "out", task=task) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored", ["", "'x; rm -rf y.Z'", "a" * 500 + ".B", "[1, 2]", "7"])
def test_only_the_name_of_a_class_is_proposed(
    stored: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(run, stored)
    assert export(run, "hf", tmp_path / "out", task="") == EXIT_USAGE
    assert capsys.readouterr().err.rstrip().endswith("--task PACKAGE.MODULE.CLASS")
    assert export(run, "hf", tmp_path / "out") == EXIT_OK


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_the_task_is_for_hugging_face_alone(to: str, run: Path, tmp_path: Path) -> None:
    assert export(run, to, tmp_path / "out", "--task", EXPORTING) == EXIT_USAGE
    assert not (tmp_path / "out").exists()


def test_no_configuration(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").unlink()
    assert export(run, "hf", tmp_path / "out") == EXIT_CONFIG
    assert "config.yaml" in capsys.readouterr().err
    assert export(run, "safetensors", tmp_path / "out") == EXIT_OK


@NO_GROUP
@pytest.mark.parametrize("to", FORMATS)
def test_it_goes_back_from_a_damaged_one_and_leaves_nothing_of_it(
    to: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-000000020"
    flip(shard(newest))
    before = sorted(run.rglob("*"))
    assert export(run, to, tmp_path / "out") == EXIT_OK
    error = capsys.readouterr().err
    assert str(shard(newest)) in error
    assert error.splitlines()[-1].startswith("done: step 10")
    assert sorted(run.rglob("*")) == before, "the run is only read"
    assert export(newest, to, tmp_path / "other") == EXIT_STORAGE
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("  - step-000000020: ")
    assert not list(tmp_path.glob("other/*"))


@pytest.mark.parametrize("to", FORMATS)
def test_out_must_be_new(to: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00002.safetensors").touch()
    assert export(run, to, tmp_path / "out") == EXIT_USAGE
    says = "is a folder" if to == "torch" else "must be empty, but holds model-00001"
    assert says in capsys.readouterr().err
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_the_file_of_torch_must_be_new(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.pt").touch()
    for out, says in (
        ("empty", "is a folder; give a name such as"),
        ("there.pt", "must not exist"),
        ("new/", "must be the name of a file"),
    ):
        assert export(run, "torch", f"{tmp_path}/{out}") == EXIT_USAGE
        assert says in capsys.readouterr().err


def test_unwritable(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for to in FORMATS:
        assert export(run, to, tmp_path / "file" / "below") == EXIT_STORAGE, to
        assert capsys.readouterr().err.splitlines()[-1].startswith("elastictrain: cannot "), to


@NO_GROUP
def test_dcp_to_this_machine_is_written_once_and_without_room_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_second_copy(**_: object) -> None:
        raise AssertionError("no temporary folder is needed")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_second_copy)
    assert export(run, "dcp", tmp_path / "out") == EXIT_OK

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    assert export(run, "dcp", tmp_path / "other") == EXIT_STORAGE
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"elastictrain: cannot write {tmp_path}/other: No space left on device; free space")


@NO_GROUP
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_memory_is_looked_at_before_it_is_used(to: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed_bytes = sum(tensor.nbytes for tensor in state_of(20).values())
    for available_bytes, code in ((needed_bytes - 1, EXIT_UNFIT), (needed_bytes, EXIT_OK)):
        memory = SimpleNamespace(available=available_bytes)
        monkeypatch.setattr("elastictrain.checkpoint.commands.export_formats.psutil.virtual_memory", lambda found=memory: found)
        assert export(run, to, tmp_path / f"{available_bytes}.out") == code


def test_unknown_step(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run, "torch", tmp_path / "out.pt", "--step", "15") == EXIT_STORAGE
    assert capsys.readouterr().err.endswith("step 10, 20\n")
