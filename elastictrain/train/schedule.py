"""The learning rate: a function of the step alone."""

import math

from elastictrain.config.optim import OptimGroup


def learning_rate(step: int, options: OptimGroup, *, total_steps: int) -> float:
    """For the optimizer step `step`, counted from 1.

    Rises linearly to `lr` at step `warmup_steps`, then follows the schedule to `final_lr_ratio * lr` at step `total_steps`.
    Source: Loshchilov and Hutter 2017 (cosine).
    """
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    span = max(1, total_steps - options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / span)
    shape = 1.0 - progress if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.lr * (options.final_lr_ratio + (1.0 - options.final_lr_ratio) * shape)
