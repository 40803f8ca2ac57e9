"""The learning rate: a function of the step alone."""

import math

from elastictrain.config.optim import OptimGroup


def learning_rate(step: int, options: OptimGroup, *, total_steps: int) -> float:
    """For the optimizer step `step`, counted from 1.

    Rises linearly to `lr` over the warm-up, then follows the schedule to `final_lr_ratio * lr` at step `total_steps`.
    Source: Loshchilov and Hutter 2017 (cosine).
    """
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
    """Steps of warm-up: never more than the run has, where the schedule follows the length of the run.

    A constant schedule does not: its run may be made longer later, and must have the same learning rates then.
    """
    return options.warmup_steps if options.schedule == "constant" else min(options.warmup_steps, total_steps)


def describe_short_warmup(options: OptimGroup, *, total_steps: int) -> str:
    """What becomes of a warm-up that is longer than the run; empty if it is not."""
    if options.warmup_steps <= total_steps:
        return ""
    steps = effective_warmup(options, total_steps=total_steps)
    becomes = f"it is shortened to {steps} steps" if steps < options.warmup_steps else "the run ends within it"
    return (
        f"the warm-up (optim.warmup_steps={options.warmup_steps}) is longer than the run (train.steps={total_steps}): {becomes}"
    )
