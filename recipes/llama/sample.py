"""Text that a model writes, so that a person can see what it has learnt."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def continue_tokens(
    next_logits: Callable[[Tensor], Tensor], prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """`prompt` followed by `num_tokens` sampled ones.

    Args:
        next_logits: tokens [n] int64 on the CPU -> logits [ids] of the next one; called exactly `num_tokens` times.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = next_logits(torch.tensor(tokens)).float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens


def windowed_logits(model: nn.Module, *, window: int, vocab_size: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The model as a function for `continue_tokens`: it sees the last `window` tokens, always in a tensor of one shape, and
    only ids below `vocab_size` are offered.

    Collective: yes, if the model's forward is.
    """

    def next_logits(tokens: Tensor) -> Tensor:
        seen = tokens[-window:]
        # What stands behind the last token cannot be seen by it: attention is causal.
        padded = torch.zeros(1, window, dtype=torch.int64)
        padded[0, : len(seen)] = seen
        logits: Tensor = model(padded.to(device))
        return logits[0, len(seen) - 1, :vocab_size]

    return next_logits
