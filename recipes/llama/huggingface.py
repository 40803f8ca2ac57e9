"""What Hugging Face calls the parts of a Llama: names of tensors, and config.json. Nothing here reads or writes."""

import re
from collections.abc import Iterable, Mapping

import torch

from elastictrain.errors import Problem

from .config import LlamaConfig

_OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_LLAMA3_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def huggingface_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of our parameter `name`. Raises: KeyError."""
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every parameter, in the order of the model."""
    kv_dim = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, config.dim)}
    for layer in range(config.num_layers):
        within = {
            "attention_norm": (config.dim,),
            "attention.q": (config.dim, config.dim),
            "attention.k": (kv_dim, config.dim),
            "attention.v": (kv_dim, config.dim),
            "attention.o": (config.dim, config.dim),
            "mlp_norm": (config.dim,),
            "mlp.gate": (config.ffn_dim, config.dim),
            "mlp.up": (config.ffn_dim, config.dim),
            "mlp.down": (config.dim, config.ffn_dim),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in within.items()}
    shapes["norm.weight"] = (config.dim,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.dim)
    return shapes


def huggingface_config(config: LlamaConfig, *, dtype: torch.dtype) -> dict[str, object]:
    """The content of config.json for `transformers.LlamaForCausalLM`."""
    scaling: dict[str, object] | None = None
    if config.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3"} | {theirs: getattr(config, ours) for theirs, ours in _LLAMA3_SCALING.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }


def config_problems(stored: Mapping[str, object], config: LlamaConfig, *, source: str) -> list[Problem]:
    """Where a Hugging Face config.json describes another model than `config`; both the layouts before and after
    transformers 5 are understood. `source` is for messages."""
    # transformers 5 keeps theta and scaling in `rope_parameters`, earlier releases in `rope_theta` and `rope_scaling`.
    rope = _mapping(stored.get("rope_parameters")) or _mapping(stored.get("rope_scaling"))
    theirs = {ours: stored[key] for key, ours in _FIELDS.items() if key in stored}
    theirs["rope_theta"] = rope.get("rope_theta", stored.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    problems = []
    if stored.get("model_type") != "llama":
        found = stored.get("model_type")
        problems.append(Problem("task.init_from", f"must be of model_type llama, but {source} says {found!r}"))
    if kind not in ("default", "llama3"):
        problems.append(Problem("task.init_from", f"must have the rope_type default or llama3, but {source} says {kind!r}"))
    for flag in ("attention_bias", "mlp_bias"):
        if stored.get(flag):
            problems.append(Problem("task.init_from", f"must have no biases, but {source} says {flag}"))
    theirs["rope_scaling_factor"] = None
    if kind == "llama3":
        theirs |= {ours: rope.get(key) for key, ours in _LLAMA3_SCALING.items()}
    problems += [
        Problem(f"model.{field}", f"must be {value!r} as in {source}, but is {getattr(config, field)!r}")
        for field, value in theirs.items()
        if value != getattr(config, field)
    ]
    return problems


def plan_shards(
    shapes: Mapping[str, tuple[int, ...]], *, element_bytes: int, shard_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """File name -> the tensors in it, in order; a file is begun when the next tensor would make one larger than
    `shard_bytes`."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * element_bytes
        if groups[-1] and used + size > shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = shape
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def weight_index(plan: Mapping[str, Iterable[str]], *, total_bytes: int) -> dict[str, object]:
    """The content of model.safetensors.index.json: file -> names of tensors, turned around."""
    return {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
