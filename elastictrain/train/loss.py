"""Calls a task's `loss`, and checks what it returns."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from elastictrain.config.user_code import calling, describe_value, locate_method, refuse
from elastictrain.data.dataset import Batch, leaves
from elastictrain.train.task import LossOutput

_RETURN = "return LossOutput(loss_sum, weight), the sum of the micro-batch's losses and the weight that divides it"


def compute_loss(loss: Callable[[nn.Module, Batch], LossOutput], module: nn.Module, batch: Batch, *, first: int) -> LossOutput:
    """The loss of the micro-batch whose positions begin at `first`. `loss`: a method of the task, or a `partial` of one.
    Raises: TaskError if it returns something else than it must, and for an IndexError; what else it raises, with a note that
    names the position."""
    method = loss.func if isinstance(loss, partial) else loss
    task, name = getattr(method, "__self__", method), getattr(method, "__name__", "loss")
    try:
        output: object = loss(module, batch)
    except IndexError:
        # A label or token beyond the model's number of them. The meta device, on which the task is tried, does not see values.
        with calling(task, name, at=f" in the micro-batch from position {first}", position=first):
            raise
    except Exception as error:
        error.add_note(f"in {locate_method(task, name)} of the micro-batch from position {first}")
        raise

    device = next((one.device for one in leaves(batch) if isinstance(one, Tensor)), None)
    if (trouble := _find_trouble(output, device)) is not None:
        raise refuse(task, name, *trouble, position=first)
    return cast(LossOutput, output)


def _find_trouble(output: object, device: torch.device | None) -> tuple[str, str] | None:
    """What `loss` must do, and what it did instead."""
    if not isinstance(output, LossOutput):
        return _RETURN, f"returned {describe_value(output)}"
    loss_sum, weight = output.loss_sum, output.weight
    for name, part in (("loss_sum", loss_sum), ("weight", weight)):
        if not isinstance(part, Tensor) or part.dim():
            return f"return a tensor of shape [] as `{name}`", f"it is {describe_value(part)}"
        if part.device != device:
            return f"return `{name}` on the batch's device {device}", f"it is on {part.device}"
    if loss_sum.dtype not in (torch.float32, torch.float64):
        return "return a `loss_sum` of float32 (use `.float()`)", f"it is {describe_value(loss_sum)}"
    if torch.is_grad_enabled() and not loss_sum.requires_grad:
        return "return a `loss_sum` with a gradient", "it has none"
    if weight.requires_grad:
        return "return a `weight` without a gradient (use `.detach()`)", "it has one"
    return _find_metric_trouble(output.metrics)


def _find_metric_trouble(metrics: object) -> tuple[str, str] | None:
    if not isinstance(metrics, Mapping):
        return "return `metrics` as a mapping of names to sums", f"it is {describe_value(metrics)}"
    for name, metric in metrics.items():
        parts = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric,)
        if any(one.dim() if isinstance(one, Tensor) else not isinstance(one, int | float) for one in parts):
            must = f"return the metric {name!r} as a sum of shape [], or as a sum and its weight"
            return must, f"it is {describe_value(metric)}"
    return None
