"""The learning rate, and the optimizers with their state allocated up front, so that a checkpoint is read straight into it."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from elastictrain.config.optim import OptimGroup
from elastictrain.config.targets import call_schedule, find_callable
from elastictrain.errors import ConfigError, Problem
from elastictrain.torch_private import multiply
from elastictrain.train.task import GroupsParameters, UpdatesInTurn

_SCALES_ITSELF = (
    "_step_supports_amp_scaling"  # torch's mark of an optimizer that takes a divisor and a flag, for its GradScaler
)
_NAMED_AT_MOST = 8


def learning_rate(step: int, options: OptimGroup, *, total_steps: int) -> float:
    """The rate of the optimizer step `step`, counted from 1. Rises linearly to `lr` over the warm-up, then follows the schedule
    to `final_lr_ratio * lr` at step `total_steps`, or is `lr` times what the user's function returns. Source: Loshchilov and
    Hutter 2017 (cosine)."""
    warmup_steps = effective_warmup(options, total_steps=total_steps)
    if step <= warmup_steps:
        return options.lr * step / warmup_steps
    if isinstance(options.schedule, Mapping):
        return options.lr * call_schedule(options.schedule, step, total_steps=total_steps)
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


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers of a model, one as a rule; each trained parameter is in exactly one group of one of them."""

    members: tuple[Optimizer, ...]
    ratios: tuple[float, ...]  # of each group's own learning rate to `optim.lr`
    first_values: tuple[tuple[Tensor, float], ...]  # each tensor of the state, and the value with which it begins

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.members for group in one.param_groups]

    def tensors(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """The live state tensors, named after their parameters."""
        for name, parameter in named_parameters:
            for one in self.members:
                for kind, tensor in one.state.get(parameter, {}).items():
                    yield f"{kind}.{name}", tensor

    @torch.no_grad()
    def reset(self) -> None:
        """Give the state its first values again."""
        for tensor, value in self.first_values:
            tensor.fill_(value)

    def update(self, *, rate: float, scale: Tensor, finite: Tensor) -> None:
        """Update all parameters with their gradients times `scale`, or nothing at all if `finite` is false; then drop the
        gradients. torch's fused optimizers take both on the device: normalising, clipping and skipping need no further pass
        over the gradients and no synchronization. Any other optimizer costs one of each in a step."""
        for group, ratio in zip(self.param_groups, self.ratios, strict=True):
            group["lr"] = rate * ratio
        for one in self.members:
            if getattr(one, _SCALES_ITSELF, False):
                # torch.amp.GradScaler passes a divisor and a flag by the same attributes.
                one.grad_scale, one.found_inf = (1.0 / scale).float(), (~finite).float()  # type: ignore[attr-defined]
                one.step()
            elif finite.item():
                gradients = [p.grad for group in one.param_groups for p in group["params"] if p.grad is not None]
                local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
                multiply(local, scale.float())
                one.step()
            one.zero_grad(set_to_none=True)


def make_optimizers(model: nn.Module, options: OptimGroup, task: object = None) -> Optimizers:
    """The optimizers that `options` name, over the groups of the task; their state allocated, as before the first step.
    Collective: no. Raises: ConfigError, also if their state cannot be in a checkpoint."""
    trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError("the model must have a parameter that is trained, but none has requires_grad")
    if isinstance(task, UpdatesInTurn) and not isinstance(task, GroupsParameters):
        raise ConfigError(
            f"{type(task).__qualname__} must have `parameter_groups`, which say what each of its `updates` changes"
        )
    groups = _own_groups(task, model, trained) if isinstance(task, GroupsParameters) else _default_groups(trained, options)
    made = _construct(groups, options)
    _check_once([group for one in made for group in one.param_groups], trained, what=options._target_ or "AdamW")
    if isinstance(task, UpdatesInTurn):
        found = {group.get("update") for one in made for group in one.param_groups}
        if found != {*task.updates} or not found:
            what = f"{type(task).__qualname__}.parameter_groups must name one of {list(task.updates)} as `update` in each group"
            raise ConfigError(f"{what}, and all of them, but the optimizer has groups for {sorted(map(str, found))}")
    ratios = tuple(float(group["lr"]) / options.lr for one in made for group in one.param_groups)
    return Optimizers(made, ratios, tuple(chain.from_iterable(map(_allocate, made))))


def _construct(groups: Sequence[dict[str, Any]], options: OptimGroup) -> tuple[Optimizer, ...]:
    target = options._target_
    if target is None:
        for group in groups:
            group.setdefault("weight_decay", options.weight_decay)
        return (AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True),)
    make = find_callable(target, key="optim._target_")
    try:
        made = make(groups, lr=options.lr, **options.arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError([Problem("optim.arguments", f"is refused by {target}: {error}")]) from error
    members = tuple(made) if isinstance(made, list | tuple) else (made,)
    if not members or not all(isinstance(one, Optimizer) for one in members):
        message = f"must make a torch.optim.Optimizer or a list of them, but {target} made {type(made).__name__}"
        raise ConfigError([Problem("optim._target_", message)])
    return members


def _default_groups(trained: Iterable[nn.Parameter], options: OptimGroup) -> list[dict[str, Any]]:
    """With our AdamW weight decay is for matrices only; an optimizer of the user's gets one group."""
    if options._target_ is not None:
        return [{"params": list(trained)}]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _own_groups(task: GroupsParameters, model: nn.Module, trained: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    what, found = f"{type(task).__qualname__}.parameter_groups", task.parameter_groups(model)
    try:
        groups = [{**group, "params": list(group["params"])} for group in found]
    except (TypeError, KeyError) as error:
        message = f"{what} must return a list of groups {{'params': [...], 'lr': ...}} as torch.optim takes them"
        raise ConfigError(f"{message}, but returned {type(found).__name__} ({error})") from error
    _check_once(groups, trained, what=what)
    return [group for group in groups if group["params"]]


def _check_once(groups: Iterable[Mapping[str, Any]], trained: Mapping[nn.Parameter, str], *, what: str) -> None:
    """Raises: ConfigError, unless each trained parameter is in exactly one group, and nothing else is."""
    counts: dict[object, int] = defaultdict(int)
    for parameter in chain.from_iterable(group["params"] for group in groups):
        counts[parameter] += 1
    missing = [name for parameter, name in trained.items() if not counts[parameter]]
    twice = [name for parameter, name in trained.items() if counts[parameter] > 1]
    others = sum(parameter not in trained for parameter in counts)
    for names, fault in ((missing, "in no group"), (twice, "in more than one")):
        if names:
            rest = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
            named = ", ".join(names[:_NAMED_AT_MOST]) + rest
            raise ConfigError(f"{what} must have each parameter that is trained in exactly one group, but {fault}: {named}")
    if others:
        raise ConfigError(f"{what} must have the model's parameters with requires_grad only, but has {others} others")


class _FirstValues(dict[str, object]):
    """The state of one parameter that remembers the first value of each name."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, object] = {}

    def __setitem__(self, name: str, value: object) -> None:
        self.first.setdefault(name, value.detach().clone() if isinstance(value, Tensor) else value)
        super().__setitem__(name, value)


@torch.no_grad()
def _allocate(optimizer: Optimizer) -> list[tuple[Tensor, float]]:
    """Allocate the state that `optimizer` would make in its first step; returns its tensors with their first values.

    A twin shows what it makes: it does one step on small probes, which have as many dimensions as the parameters, and zero
    gradients. So no parameter changes, no rank asks another one, and no memory is taken beyond the state."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    # Some make their state when they are constructed.
    probes = {one: _probe(one) for one in parameters if not optimizer.state.get(one)}
    states = {one: _FirstValues() for one in probes}
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    groups = [
        {**group, "params": [probes[one] for one in group["params"] if one in probes]} for group in optimizer.param_groups
    ]
    twin.param_groups = [dict(group) for group in groups]
    twin.state = defaultdict(dict, {probes[one]: state for one, state in states.items()})
    step: Callable[[Optimizer], object] = getattr(type(twin).step, "__wrapped__", type(twin).step)  # without anybody's hooks
    name = type(optimizer).__qualname__
    try:
        step(twin)
    except (TypeError, RuntimeError) as error:
        raise _unfit(f"whose step takes dense gradients and no arguments, but {name} says: {error}") from error
    for old, new in zip(groups, twin.param_groups, strict=True):
        if changed := [key for key, value in new.items() if key != "params" and value != old.get(key)]:
            raise _unfit(
                f"that keeps its state by parameter, but {name} keeps {changed[0]!r} in its groups, which are not saved"
            )
    found = []
    for parameter in parameters:
        made = states[parameter].first if parameter in probes else dict(optimizer.state[parameter])
        for kind, value in made.items():
            what = f"{name} keeps {kind!r} for a parameter of shape {list(parameter.shape)}"
            tensor, first = _like(value, parameter, shape=probes.get(parameter, parameter).shape, what=what)
            optimizer.state[parameter][kind] = tensor
            found.append((tensor, first))
    return found


def _probe(parameter: Tensor) -> Tensor:
    sizes = tuple(range(2, 2 + parameter.ndim))
    probe = torch.zeros(sizes, dtype=parameter.dtype, device="cpu" if parameter.is_meta else parameter.device)
    probe.grad = torch.zeros_like(probe)
    return probe


def _unfit(must: str) -> ConfigError:
    return ConfigError([Problem("optim._target_", f"must make an optimizer {must}")])


def _like(value: object, parameter: Tensor, *, shape: torch.Size, what: str) -> tuple[Tensor, float]:
    """The tensor of the state of `parameter` that is like `value`, that of its probe with `shape`, and what fills it."""
    if not isinstance(value, Tensor):
        raise _unfit(f"that keeps tensors, but {what} as {type(value).__name__}")
    first = value.flatten()[:1]
    if not bool((value == first).all()):
        raise _unfit(f"whose tensors begin with one value everywhere, but {what} with several")
    filling = first.item()
    if value.shape == shape and value.ndim:
        return torch.full_like(parameter, filling, dtype=value.dtype, memory_format=torch.preserve_format).detach(), filling
    sizes = dict(zip(shape, parameter.shape, strict=True))
    if (value.ndim and isinstance(parameter, DTensor)) or not {*value.shape} <= {1, *sizes}:
        sharded = ", which cannot be sharded: choose parallel=ddp" if isinstance(parameter, DTensor) else ""
        raise _unfit(f"whose tensors have the shape of their parameter or one number, but {what} with another shape{sharded}")
    whole = [sizes.get(size, size) for size in value.shape]
    return torch.full(whole, filling, dtype=value.dtype, device=parameter.device), filling
