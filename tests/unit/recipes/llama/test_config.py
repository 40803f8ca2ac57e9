import math
from pathlib import Path

import pytest
import torch
import yaml

from elastictrain.errors import ConfigError
from recipes.llama.config import LlamaConfig
from recipes.llama.huggingface import parameter_shapes
from recipes.llama.task import LlamaTask

CONF = Path(__file__).parents[4] / "conf" / "model"
SHAPE = {"vocab_size": 32, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}


def load(name: str) -> LlamaConfig:
    return LlamaConfig(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))


@pytest.mark.parametrize(
    ("name", "expected"), [("tiny", 918_656), ("150m", 152_878_720), ("1b", 1_498_482_688), ("8b", 8_030_261_248)]
)
def test_sizes_have_their_parameter_counts(name: str, expected: int) -> None:
    config = load(name)
    with torch.device("meta"):
        model = LlamaTask(model=config).build_model()
    named = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert sum(map(math.prod, named.values())) == expected
    assert named == parameter_shapes(config)
    assert config.vocab_size >= 257


def test_fields_that_do_not_fit_are_all_reported() -> None:
    wrong = SHAPE | {"dim": 20, "num_kv_heads": 3, "rope_scaling_factor": 8.0, "rope_high_freq_factor": 1.0}
    with pytest.raises(ConfigError) as caught:
        LlamaConfig(**wrong)
    assert [problem.key for problem in caught.value.problems] == [
        "model.dim",
        "model.num_kv_heads",
        "model.rope_high_freq_factor",
    ]
    assert "model.num_heads" in caught.value.problems[1].message
