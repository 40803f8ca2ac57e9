"""Cross-entropy of a language model's head without ever holding the logits of all tokens.

With a vocabulary of 128k the logits and their gradient outweigh everything else. Here a chunk of tokens at a time goes through
the head, the softmax and straight back: both gradients are computed in the forward pass (three matrix products in all, none
repeated), and the backward pass only scales them. What lives at once is the logits of one chunk in the precision of the
hidden state, and the gradient of the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LossAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy, [] float32, and its gradient in the dtype of `logits` [N, vocab]; `targets` [N] int64."""
    values = logits.float()
    log_total = values.logsumexp(dim=-1, keepdim=True)
    chosen = values.gather(1, targets[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = torch.exp(values - log_total) - is_target.to(values.dtype)
    return (log_total - chosen).sum(), gradient.to(logits.dtype)


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How the loss is computed; none of it changes what is computed."""

    chunk_tokens: int
    compiled: bool = False
    """Whether the elementwise part is fused by torch.compile."""

    def loss_and_gradient(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As the function above. On tensors without memory there is nothing to fuse."""
        function = _compiled() if self.compiled and not logits.is_meta else loss_and_gradient
        return function(logits, targets)


@cache
def _compiled() -> LossAndGradient:
    """Made once it is needed: torch.compile imports the compiler for it, which takes a second or two."""
    return cast(LossAndGradient, torch.compile(loss_and_gradient, dynamic=False))


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, *, options: LossOptions) -> Tensor:
    """Sum over tokens of the cross-entropy of `hidden @ weight.T`, [] float32.

    `hidden` [N, dim] sets the precision of the products; `weight` [vocab, dim] of any floating dtype; `targets` [N] int64.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return cast(Tensor, _CrossEntropySum.apply(hidden, weight, targets, options))  # type: ignore[no-untyped-call]
    head = weight.to(hidden.dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for chunk in _chunks(len(hidden), size=options.chunk_tokens):
        total += F.cross_entropy((hidden[chunk] @ head.t()).float(), targets[chunk], reduction="sum")
    return total


def _chunks(length: int, *, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """[] float32, as `cross_entropy_sum`. Saves both gradients, which `backward` only scales."""
        head = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        chunks = _chunks(len(hidden), size=options.chunk_tokens)
        # One chunk needs no more precision than its product has; the sum of several is kept in float32.
        weight_gradient = torch.zeros_like(head, dtype=torch.float32) if len(chunks) > 1 else torch.empty_like(head)
        for chunk in chunks:
            rows = hidden[chunk]
            loss, logits_gradient = options.loss_and_gradient(rows @ head.t(), targets[chunk])
            total += loss
            torch.mm(logits_gradient, head, out=hidden_gradient[chunk])
            if len(chunks) > 1:
                _add_product(weight_gradient, logits_gradient.t(), rows)
            else:
                torch.mm(logits_gradient.t(), rows, out=weight_gradient)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        # Scaled and rounded in one pass over what may be gigabytes.
        scaled = torch.mul(weight_gradient, gradient, out=torch.empty_like(weight_gradient, dtype=ctx.weight_dtype))
        return hidden_gradient * gradient, scaled, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` is float32 and the factors may be narrower."""
    if total.is_cuda and left.dtype != total.dtype:
        # The product leaves the kernel in float32 and is added there: one pass over `total` instead of three.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
