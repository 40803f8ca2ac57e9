"""The group `model` of the task `llama`: the shape of a Llama 3."""

from dataclasses import dataclass
from typing import Annotated

from elastictrain.config.constraints import Range
from elastictrain.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama 3. Raises: ConfigError for fields that do not fit together."""

    vocab_size: Annotated[int, Range(1)]
    """Token ids that the model knows, [0, vocab_size). The byte-level tokenizer needs 257."""

    dim: Annotated[int, Range(1)]
    """Width of the residual stream."""

    num_layers: Annotated[int, Range(1, 10_000)]
    """Transformer blocks."""

    num_heads: Annotated[int, Range(1)]
    """Query heads; `dim` is split evenly among them."""

    num_kv_heads: Annotated[int, Range(1)]
    """Key and value heads (GQA); each serves `num_heads / num_kv_heads` query heads."""

    ffn_dim: Annotated[int, Range(1)]
    """Width of the gated feed-forward layer (SwiGLU)."""

    max_seq_len: Annotated[int, Range(1)] = 8192
    """Longest sequence for which rotary angles are kept."""

    norm_eps: Annotated[float, Range(0.0, exclusive=True)] = 1e-5
    """Added to the mean square in RMSNorm."""

    rope_theta: Annotated[float, Range(1.0, exclusive=True)] = 500000.0
    """Base of the rotary frequencies."""

    rope_scaling_factor: Annotated[float, Range(1.0)] | None = None
    """Llama 3.1 frequency scaling: low frequencies are divided by this (8 in Llama 3.1). null turns it off, and the three
    fields below have no effect."""

    rope_low_freq_factor: Annotated[float, Range(0.0, exclusive=True)] = 1.0
    """Wavelengths above `rope_original_max_position / rope_low_freq_factor` are scaled in full."""

    rope_high_freq_factor: Annotated[float, Range(0.0, exclusive=True)] = 4.0
    """Wavelengths below `rope_original_max_position / rope_high_freq_factor` are not scaled; in between it is interpolated."""

    rope_original_max_position: Annotated[int, Range(1)] = 8192
    """Sequence length of the training that the scaling extends."""

    tie_embeddings: bool = False
    """Use the embedding matrix as the output head too."""

    def __post_init__(self) -> None:
        problems = []
        if self.dim % (2 * self.num_heads):
            problems.append(
                Problem("model.dim", f"must be a multiple of 2 * model.num_heads = {2 * self.num_heads}, but is {self.dim}")
            )
        if self.num_heads % self.num_kv_heads:
            problems.append(
                Problem("model.num_kv_heads", f"must divide model.num_heads = {self.num_heads}, but is {self.num_kv_heads}")
            )
        if self.rope_scaling_factor is not None and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            problems.append(
                Problem(
                    "model.rope_high_freq_factor",
                    f"must be > model.rope_low_freq_factor = {self.rope_low_freq_factor}, but is {self.rope_high_freq_factor}",
                )
            )
        if problems:
            raise ConfigError(problems)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads
