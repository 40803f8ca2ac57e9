"""The group `task`: what is trained."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """What is trained: a class, and the keyword arguments of its constructor."""

    target: str
    """Key `task._target_`: dotted path of the task's class, e.g. `recipes.llama.LlamaTask` or `my_package.my_module.MyTask`."""

    options: Mapping[str, object]
    """Every other key under `task`, checked against the constructor's annotated parameters."""
