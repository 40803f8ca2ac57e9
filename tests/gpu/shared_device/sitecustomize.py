"""On PYTHONPATH, with RANKS_PER_DEVICE=N: N ranks of a host share its first CUDA device, and communicate over NCCL.

NCCL refuses two ranks of one host on the same device. Here each rank names a host of its own (NCCL_HOSTID), so that NCCL takes
sockets between them. That is slow, and like several hosts in what a death does to the others.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

RANKS = int(os.environ.get("RANKS_PER_DEVICE", "0"))


class Facade:
    """An object of which some attributes are replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _patch(module: ModuleType) -> None:
    import torch

    cuda = Facade(
        torch.cuda,
        device_count=lambda: RANKS,
        set_device=lambda _: torch.cuda.set_device(0),
        mem_get_info=lambda _=None: torch.cuda.mem_get_info(0),
        get_device_capability=lambda _=None: torch.cuda.get_device_capability(0),
    )
    module.torch = Facade(torch, cuda=cuda, device=lambda kind, _=0: torch.device(kind, 0))  # type: ignore[attr-defined]
    if module.__name__.endswith(".group"):
        use_device = module._use_device

        def use_shared(identity: Any, on_gpu: bool) -> torch.device:
            os.environ["NCCL_HOSTID"] = f"rank-{identity.rank}"
            device: torch.device = use_device(identity, on_gpu)
            return device

        module._use_device = use_shared  # type: ignore[attr-defined]


class Finder(importlib.abc.MetaPathFinder):
    """Patches the modules that use a device by its number, after they were loaded."""

    names = frozenset(
        f"elastictrain.{name}"
        for name in ("distributed.device", "distributed.float8", "distributed.group", "train.bringup", "train.standby")
    )

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if RANKS:
    sys.meta_path.insert(0, Finder())
