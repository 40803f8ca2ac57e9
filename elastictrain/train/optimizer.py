"""The learning rate, and AdamW with its state allocated up front, so that a checkpoint is read straight into it."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from elastictrain.config.composed import OptimGroup


def learning_rate(step: int, options: OptimGroup, *, total_steps: int) -> float:
    """The rate of the optimizer step `step`, counted from 1. Rises linearly to `lr` over the warm-up, then follows the schedule
    to `final_lr_ratio * lr` at step `total_steps`. Source: Loshchilov and Hutter 2017 (cosine)."""
    warmup_steps = effective_warmup(options, total_steps=total_steps)
    if step <= warmup_steps:
        return options.lr * step / warmup_steps
    if options.schedule == "constant":
        return options.lr
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    shape = 1.0 - progress if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.lr * (options.final_lr_ratio + (1.0 - options.final_lr_ratio) * shape)


def effective_warmup(options: OptimGroup, *, total_steps: int) -> int:
    """Steps of warm-up: no more than the run has, unless the schedule is constant: such a run may be made longer later."""
    return options.warmup_steps if options.schedule == "constant" else min(options.warmup_steps, total_steps)


def describe_short_warmup(options: OptimGroup, *, total_steps: int) -> str:
    """A sentence about a warm-up that is longer than the run; empty if it is not."""
    if options.warmup_steps <= total_steps:
        return ""
    steps = effective_warmup(options, total_steps=total_steps)
    becomes = f"it is shortened to {steps} steps" if steps < options.warmup_steps else "the run ends within it"
    return (
        f"the warm-up (optim.warmup_steps={options.warmup_steps}) is longer than the run (train.steps={total_steps}): {becomes}"
    )


_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, options: OptimGroup) -> AdamW:
    """AdamW with weight decay on matrices only, its state allocated: zero moments, zero steps. The fused kernel takes a divisor
    of the gradients and a flag that leaves the whole update out. `Stepper` relies on both: normalising, clipping and skipping
    need no further pass over the gradients and no synchronization with the device."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )
    for parameter in parameters:
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in _MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return optimizer


def forget_steps(optimizer: AdamW) -> None:
    """Reset moments and step counts to zero."""
    with torch.no_grad():
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()


def optimizer_tensors(optimizer: AdamW, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """The live state tensors, named after their parameters."""
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            for kind in ("step", *_MOMENTS):
                yield f"{kind}.{name}", optimizer.state[parameter][kind]
