"""Functions and classes that a key names by dotted path, besides the task's class: the optimizer and the schedule."""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from elastictrain.config.constraints import show
from elastictrain.config.optim import OptimGroup
from elastictrain.errors import ConfigError, Problem

_OURS = ("beta1", "beta2", "eps", "weight_decay")  # keys that only our AdamW reads


def find_callable(path: object, *, key: str) -> Callable[..., Any]:
    """What `path` names; importing it has all side effects of its module. Raises: ConfigError naming `key`."""
    module_name, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module_name:
        raise ConfigError([Problem(key, f"must be package.module.name of a class or function, but is {show(path)}")])
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        message = f"must name a class or function, but {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError([Problem(key, message)]) from error
    if not callable(found):
        raise ConfigError([Problem(key, f"must name a class or function, but {module_name} has none named {name}")])
    return found  # type: ignore[no-any-return]


def call_schedule(schedule: Mapping[str, object], step: int, *, total_steps: int) -> float:
    """The share of `optim.lr` at `step`, counted from 1, that the user's function says; it gets `total_steps` if it takes it.
    Raises: ConfigError if it is not a finite number >= 0."""
    key = "optim.schedule._target_"
    arguments = {name: value for name, value in schedule.items() if name != "_target_"}
    function = find_callable(schedule.get("_target_"), key=key)
    try:
        takes = inspect.signature(function).parameters
    except ValueError:
        takes = {}  # type: ignore[assignment]
    if "total_steps" in takes:
        arguments["total_steps"] = total_steps
    try:
        share = function(step, **arguments)
    except Exception as error:
        message = f"must name a function of the step, but for step {step} {function.__qualname__} raised"
        raise ConfigError([Problem(key, f"{message} {type(error).__name__}: {error}")]) from error
    if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share) or share < 0:
        message = (
            f"must return a share of optim.lr, a number >= 0, but for step {step} {function.__qualname__} returned {share!r}"
        )
        raise ConfigError([Problem(key, message)])
    return float(share)


def check_targets(optim: OptimGroup, *, total_steps: int) -> list[Problem]:
    """Problems with the classes and functions that `optim` names, and with keys that they leave without effect."""
    problems: list[Problem] = []
    if isinstance(optim.schedule, Mapping):
        try:
            for step in (1, total_steps):
                call_schedule(optim.schedule, step, total_steps=total_steps)
        except ConfigError as error:
            problems += error.problems
    if optim._target_ is None:
        if optim.arguments:
            problems.append(Problem("optim.arguments", "has no effect without `optim._target_`"))
        return problems
    defaults = {field.name: field.default for field in fields(OptimGroup)}
    for name in _OURS:
        if (value := getattr(optim, name)) != defaults[name]:
            message = (
                f"is {show(value)}, but has no effect with `optim._target_`: leave it out (`~optim.{name}` on the command line)"
            )
            problems.append(Problem(f"optim.{name}", message))
    try:
        signature = inspect.signature(find_callable(optim._target_, key="optim._target_"))
        signature.bind([], lr=optim.lr, **optim.arguments)
    except ConfigError as error:
        problems += error.problems
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[1:])
        problems.append(Problem("optim.arguments", f"must fit {optim._target_}, which takes {takes}: {error}"))
    except ValueError:
        pass  # it does not say what it takes
    return problems
