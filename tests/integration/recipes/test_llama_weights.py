import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elastictrain.errors import ConfigError, DataError
from elastictrain.storage.opening import open_store
from recipes.llama.config import LlamaConfig
from recipes.llama.huggingface import plan_shards
from recipes.llama.model import Llama
from recipes.llama.task import LlamaTask
from recipes.llama.weights import HuggingFaceWeights, export_weights

PLAIN = LlamaConfig(vocab_size=80, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, max_seq_len=64)
# The original length is short enough that all three ranges of frequencies occur.
SCALED = dataclasses.replace(PLAIN, rope_scaling_factor=8.0, rope_original_max_position=256)
TIED = dataclasses.replace(PLAIN, tie_embeddings=True, num_kv_heads=4)
CONFIGS = {"plain": PLAIN, "llama 3.1 scaling": SCALED, "tied": TIED}
TOKENS = torch.randint(0, 80, (2, 48), generator=torch.Generator().manual_seed(0))


def random_model(config: LlamaConfig) -> Llama:
    torch.manual_seed(0)
    model = LlamaTask(model=config).build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1 + 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.1 * torch.randn_like(parameter))
    return model


def export(model: Llama, folder: Path, *, shard_bytes: int = 10**9, dtype: torch.dtype = torch.float32) -> None:
    export_weights(
        model.get_parameter, config=model.config, store=open_store(str(folder)), dtype=dtype, shard_bytes=shard_bytes
    )


def import_model(config: LlamaConfig, folder: Path) -> Llama:
    task = LlamaTask(model=config, init_from=str(folder))
    model = task.build_model()
    for name, parameter in model.named_parameters():
        task.init_parameter(name, parameter, torch.Generator())
    return model


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        # Whatever torch deprecates inside transformers is not ours to fix.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"transformers\..*|torch\..*")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*|torch\..*")
        yield


@pytest.mark.parametrize("shard_bytes", [10**9, 60_000])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_computes_the_same_logits_from_exported_weights(
    config: LlamaConfig, shard_bytes: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = random_model(config)
    export(model, tmp_path, shard_bytes=shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert type(theirs) is transformers.LlamaForCausalLM
    assert not any(report.values()), report
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    with torch.no_grad():
        ours, expected = model(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_weights_saved_by_transformers_are_read(config: LlamaConfig, max_shard_size: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling_factor is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=80,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=96,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=0.1,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    with torch.no_grad():
        ours, expected = import_model(config, tmp_path)(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= 1e-4


def test_what_is_exported_is_read_again(tmp_path: Path) -> None:
    model = random_model(SCALED)
    export(model, tmp_path, shard_bytes=60_000, dtype=torch.bfloat16)
    again = import_model(SCALED, tmp_path)
    for (name, left), (_, right) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(left.bfloat16().float(), right), name


def test_config_of_another_model_is_refused_by_key(tmp_path: Path) -> None:
    export(random_model(SCALED), tmp_path)
    other = dataclasses.replace(PLAIN, rope_theta=10000.0, norm_eps=1e-6)
    with pytest.raises(ConfigError) as caught:
        HuggingFaceWeights(open_store(str(tmp_path)), config=other).read("norm.weight")
    keys = [problem.key for problem in caught.value.problems]
    assert set(keys) == {
        "model.norm_eps",
        "model.rope_theta",
        "model.rope_scaling_factor",
        "model.rope_original_max_position",
    }
    (said,) = (problem.message for problem in caught.value.problems if problem.key == "model.norm_eps")
    assert [part in said for part in ("1e-05", f"{tmp_path}/config.json", "1e-06")] == [True] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type llama"),
        ({"attention_bias": True}, "no biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type default or llama3, but .* says 'yarn'"),
    ],
)
def test_architectures_that_differ_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    export(random_model(PLAIN), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        import_model(PLAIN, tmp_path)


def renamed(whole: bytes) -> bytes:
    return whole.replace(b'"model.norm.weight"', b'"model.form.weight"')


def turned(whole: bytes) -> bytes:
    return whole.replace(b'"shape":[80,64]', b'"shape":[64,80]')


@pytest.mark.parametrize(
    ("damage", "name", "named"),
    [
        (renamed, "norm.weight", ("model.norm.weight",)),
        (turned, "embed.weight", ("model.embed_tokens.weight", "(80, 64)", "(64, 80)")),
        (lambda whole: whole[:-1], "head.weight", ("lm_head.weight", "20480", "20479")),
        (lambda whole: b"", "norm.weight", ()),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "norm.weight", ()),
        (lambda whole: whole[:8] + b"x" + whole[9:], "norm.weight", ()),
        (None, "norm.weight", ()),
    ],
)
def test_tensors_that_are_wrong_are_named_with_their_file(
    damage: Callable[[bytes], bytes] | None, name: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    export(random_model(PLAIN), tmp_path)
    file = tmp_path / "model.safetensors"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError) as caught:
        HuggingFaceWeights(open_store(str(tmp_path)), config=PLAIN).read(name)
    assert [part for part in (str(file), *named) if part not in str(caught.value)] == []


def test_a_folder_without_its_config_is_refused(tmp_path: Path) -> None:
    export(random_model(PLAIN), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/config.json"):
        HuggingFaceWeights(open_store(str(tmp_path)), config=PLAIN).read("norm.weight")


def test_missing_head_hints_at_tied_embeddings(tmp_path: Path) -> None:
    export(random_model(TIED), tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    del content["tie_word_embeddings"]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"model\.tie_embeddings=true"):
        import_model(dataclasses.replace(TIED, tie_embeddings=False), tmp_path)


def test_export_refuses_a_tensor_of_another_shape(tmp_path: Path) -> None:
    model = random_model(PLAIN)
    with pytest.raises(DataError, match=r"embed\.weight") as caught:
        export_weights(model.get_parameter, config=dataclasses.replace(PLAIN, vocab_size=81), store=open_store(str(tmp_path)))
    assert [shape in str(caught.value) for shape in ("(81, 64)", "(80, 64)")] == [True] * 2
    assert not (tmp_path / "model.safetensors").exists()


def test_shards_are_filled_in_order_up_to_their_size() -> None:
    shapes = {"a": (10,), "b": (10,), "c": (30,), "d": (1,)}
    plan = plan_shards(shapes, element_bytes=2, shard_bytes=40)
    assert [list(group) for group in plan.values()] == [["a", "b"], ["c"], ["d"]]
    assert next(iter(plan)) == "model-00001-of-00003.safetensors"
    assert list(plan_shards(shapes, element_bytes=2, shard_bytes=102)) == ["model.safetensors"]
