from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.config.composed import CheckpointGroup
from elastictrain.config.digest import to_yaml
from elastictrain.config.load import load
from elastictrain.errors import EXIT_CONFIG, EXIT_OK, EXIT_STORAGE, EXIT_USAGE
from elastictrain.storage.opening import open_store
from recipes.llama.config import LlamaConfig
from recipes.llama.export import main
from recipes.llama.model import Llama
from recipes.llama.task import LlamaTask
from recipes.llama.weights import HuggingFaceWeights

CONFIG = LlamaConfig(vocab_size=80, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, max_seq_len=32)
OVERRIDES = (
    "model.vocab_size=80",
    "model.dim=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=24",
    "model.max_seq_len=32",
)


def model_of(step: int) -> Llama:
    torch.manual_seed(step)
    model = LlamaTask(model=CONFIG).build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def tensors_of(model: Llama) -> dict[str, Tensor]:
    return {f"model.{name}": parameter for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def config_text() -> str:
    return to_yaml(load(["recipe=llama_tiny", *OVERRIDES]))


@pytest.fixture
def run(tmp_path: Path, config_text: str) -> Path:
    """A run's folder with checkpoints of the steps 1 and 2."""
    folder = tmp_path / "run"
    store = open_store(str(folder))
    store.write("config.yaml", config_text.encode())
    checkpointer = Checkpointer(
        store,
        options=CheckpointGroup(),
        group=None,
        rank=0,
        world_size=1,
        incarnation="000001-a",
        config_digest="digest",
        record=lambda event: None,
    )
    for step in (1, 2):
        checkpointer.save(step, tensors=tensors_of(model_of(step)), state={"step": step}, reason="interval")
    return folder


def shard_of(run: Path, step: int) -> Path:
    (file,) = (run / "checkpoints" / f"step-{step:09d}").glob("*.safetensors")
    return file


def exported(out: Path) -> dict[str, Tensor]:
    weights = HuggingFaceWeights(open_store(str(out)), config=CONFIG)
    return {f"model.{name}": weights.read(name) for name, _ in model_of(1).named_parameters()}


def assert_step(out: Path, step: int, *, dtype: torch.dtype = torch.float32) -> None:
    found, wanted = exported(out), tensors_of(model_of(step))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.detach().to(dtype)), name


def test_newest_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == EXIT_OK
    assert_step(tmp_path / "out", 2)
    assert "(21 tensors" in capsys.readouterr().err


def test_bf16_unless_told_otherwise(run: Path, tmp_path: Path) -> None:
    assert main([str(run), str(tmp_path / "out")]) == EXIT_OK
    assert_step(tmp_path / "out", 2, dtype=torch.bfloat16)


def test_chosen_step(run: Path, tmp_path: Path) -> None:
    assert main([str(run), str(tmp_path / "out"), "--step", "1", "--dtype", "fp32"]) == EXIT_OK
    assert_step(tmp_path / "out", 1)


def test_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(shard_of(run, 2).read_bytes())
    data[-1] ^= 1
    shard_of(run, 2).write_bytes(data)
    before = sorted(run.rglob("*"))
    assert main([str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == EXIT_OK
    assert_step(tmp_path / "out", 1)
    assert str(shard_of(run, 2)) in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before, "the run's folder is only read"


def test_missing_file_is_passed_over(run: Path, tmp_path: Path) -> None:
    shard_of(run, 2).unlink()
    assert main([str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == EXIT_OK
    assert_step(tmp_path / "out", 1)


def test_no_valid_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard_of(run, 1).unlink()
    (run / "checkpoints" / "step-000000002" / "manifest.json").write_text("{}")
    assert main([str(run), str(tmp_path / "out")]) == EXIT_STORAGE
    said = capsys.readouterr().err
    assert [part in said for part in ("step-000000001", "000001-a-r00000-000.safetensors", "step-000000002")] == [True] * 3


def test_unknown_step(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), str(tmp_path / "out"), "--step", "7"]) == EXIT_STORAGE
    assert {"7,", "1,", "2"} <= {*capsys.readouterr().err.split()}


def test_out_must_be_empty(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00002.safetensors").touch()
    assert main([str(run), str(tmp_path / "out")]) == EXIT_USAGE
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("task:\n  _target_: recipes.llama.LlamaTask", "task:\n  _target_: a.Task"), "`task._target_` must be recipes.llama"),
        (("dim: 16", "dim: 16\n  width: 3"), "`model.width` is not a key"),
        (("num_layers: 2", "num_layers: 3"), "layers.2.attention_norm.weight is not in it"),
        (("ffn_dim: 24", "ffn_dim: 25"), "but layers.0.mlp.gate.weight has the shape [24, 16] in it"),
    ],
)
def test_config_of_another_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str
) -> None:
    text = (run / "config.yaml").read_text()
    assert change[0] in text
    (run / "config.yaml").write_text(text.replace(*change))
    assert main([str(run), str(tmp_path / "out")]) == EXIT_CONFIG
    assert message in capsys.readouterr().err


def test_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == EXIT_CONFIG
    assert "config.yaml" in capsys.readouterr().err


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["only-one"]) == EXIT_USAGE
    assert main(["--help"]) == EXIT_OK
