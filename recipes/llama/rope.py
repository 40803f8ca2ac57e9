"""Rotary position embedding in real arithmetic, with Llama 3.1 frequency scaling."""

import math

import torch
from torch import Tensor, nn

from .config import LlamaConfig


def rope_frequencies(config: LlamaConfig, *, device: torch.device | None = None) -> Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] float32.

    Source: Llama 3.1's reference code, `apply_scaling`: long wavelengths are stretched by the factor, short ones are kept, and
    between the two limits the frequency is interpolated linearly in `original_max_position / wavelength`.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling_factor is None:
        return frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.rope_scaling_factor + kept * frequencies


def rope_tables(config: LlamaConfig, *, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [max_seq_len, head_dim / 2] float32."""
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(config, device=device))
    return angles.cos(), angles.sin()


class Rotary(nn.Module):
    """Turns queries and keys by their position. One instance is shared by all blocks.

    The tables are a module's buffers, not arguments of the blocks, because FSDP casts arguments to bf16, and bf16 cannot tell
    neighbouring positions apart.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`x` [B, T, heads, head_dim], `positions` [B, T] int64, or the index along T; the halves of head_dim are the pairs, as
        in Hugging Face."""
        cos = self.cos[: x.shape[1], None, :] if positions is None else self.cos[positions].unsqueeze(2)
        sin = self.sin[: x.shape[1], None, :] if positions is None else self.sin[positions].unsqueeze(2)
        # The tables are float32, so the products are, whatever `x` is.
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
