"""The Llama 3 architecture: GQA, rotary positions, RMSNorm, SwiGLU."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import LlamaConfig
from .loss import LossOptions, cross_entropy_sum
from .packed import Packed
from .rope import Rotary


def _attention_backends() -> list[SDPBackend]:
    """Fastest first. The backward passes of the two left out of deterministic runs add in any order."""
    if torch.are_deterministic_algorithms_enabled():
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class RMSNorm(nn.Module):
    """Root-mean-square norm; the arithmetic inside is float32 whatever the input is."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., dim]; the result has its dtype."""
        # The fused kernel wants one dtype: under autocast the weight is float32 and the stream is not.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and value head."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_kv_heads != config.num_heads
        kv_dim = config.num_kv_heads * config.head_dim
        self.rotary = rotary
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, kv_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_dim, bias=False)
        self.o = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, packed: Packed | None = None) -> Tensor:
        """`x` [B, T, dim]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        positions = None if packed is None else packed.positions
        q = self.rotary(self.q(x).view(heads), positions).transpose(1, 2)
        k = self.rotary(self.k(x).view(heads), positions).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        if packed is not None:
            mixed = packed.attention(q, k, v, grouped=self.grouped)
        else:
            with sdpa_kernel(_attention_backends(), set_priority=True):
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, T, dim]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, rotary)
        self.mlp_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, packed: Packed | None = None) -> Tensor:
        """`x` [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x), packed)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Token ids in; logits out, or the summed loss, so that the whole logits never need to exist."""

    def __init__(self, config: LlamaConfig, loss: LossOptions) -> None:
        super().__init__()
        self.config = config
        self.loss = loss
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        rotary = Rotary(config)
        self.layers = nn.ModuleList(Block(config, rotary) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        # A tied head is no parameter of its own: filling a model built on the meta device would untie two of one.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """`tokens` [B, T] int64 -> logits [B, T, vocab]; with `targets` [B, T] int64 -> the sum of all losses, [] float32.

        `documents` [B, T] int64: the document of each token. No token sees another document; a target of -1 has no loss.
        """
        x = self.embed(tokens)
        packed = None if documents is None else Packed.of(documents)
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        for layer in self.layers:
            x = layer(x) if packed is None else layer(x, packed)
        x = self.norm(x)
        weight = self.embed.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, weight.to(x.dtype))
        if packed is None:
            return cross_entropy_sum(x.flatten(0, 1), weight, targets.flatten(), options=self.loss)
        # A row of zeros has the loss log(vocab) and gives the head no gradient; nothing flows back to what it replaces.
        ignored = targets < 0
        x = x.masked_fill(ignored[..., None], 0.0)
        total = cross_entropy_sum(x.flatten(0, 1), weight, targets.clamp(min=0).flatten(), options=self.loss)
        return total - ignored.sum() * math.log(len(weight))
