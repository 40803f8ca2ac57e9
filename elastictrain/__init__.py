"""Fault-tolerant PyTorch training on preemptible machines.

`python -m elastictrain.run` trains a task; `attach` gives the same to loops that users write themselves. Names are imported
when they are first used: torch and all else stay out of commands that do not need them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastictrain.version import __version__ as __version__

if TYPE_CHECKING:
    from elastictrain.own_loop.loading import load as load
    from elastictrain.own_loop.per_rank import PerRank as PerRank
    from elastictrain.own_loop.run import Run as Run
    from elastictrain.own_loop.run import attach as attach
    from elastictrain.own_loop.run import recoverable as recoverable
    from elastictrain.own_loop.sample_order import SampleOrder as SampleOrder
    from elastictrain.own_loop.session import init_process_group as init_process_group

_PLACES = {
    "PerRank": "own_loop.per_rank",
    "Run": "own_loop.run",
    "SampleOrder": "own_loop.sample_order",
    "attach": "own_loop.run",
    "init_process_group": "own_loop.session",
    "load": "own_loop.loading",
    "recoverable": "own_loop.run",
}

__all__ = ["PerRank", "Run", "SampleOrder", "__version__", "attach", "init_process_group", "load", "recoverable"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'elastictrain' has no attribute {name!r}")
    return getattr(import_module(f"elastictrain.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
