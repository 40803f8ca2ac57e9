"""What chaos does inside the processes of a run: `sitecustomize` of a folder on their path calls `install`.

Each host has a control folder; `FOLDER` names it in the environment of all its processes:

    clock      8 bytes: seconds by which the wall clock is wrong
    requests   JSON, a `StorageFault`: what happens to requests to storage; no file: nothing
    do-PID     `hang`, `spin` (with the interpreter's lock) or `flip SHARE`: what the worker PID does before its next update

It imports nothing that a launcher does not import anyway, and must not fail where a file is just being made or removed.
"""

import importlib.abc
import importlib.machinery
import json
import mmap
import os
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "ELASTICTRAIN_CHAOS"
PAUSE = "ELASTICTRAIN_CHAOS_PAUSE_S"  # of each update of a model

_CLOCK = struct.Struct("<d")
_SITE = "from elastictrain.chaos import in_process\nin_process.install()\n"
_FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class StorageFault:
    """`refused`: the share of requests that end with status 503; `slower_s`: each takes so much longer."""

    refused: float = 0.0
    slower_s: float = 0.0
    only: tuple[str, ...] = ()  # actions, such as `write`; empty: all


class RefusedRequestError(Exception):
    """As a storage service answers that is too busy."""

    status_code = 503
    error_code = "SlowDown"


@dataclass(frozen=True, slots=True)
class HostControl:
    """The outside of a host's control folder."""

    folder: Path

    def environment(self, *, hooks: Path, sources: Path, pause_s: float) -> dict[str, str]:
        """For the processes of the host. `hooks`: a folder that is made; `sources`: the one that has the package."""
        self.folder.mkdir(parents=True, exist_ok=True)
        hooks.mkdir(parents=True, exist_ok=True)
        (hooks / "sitecustomize.py").write_text(_SITE)
        if not (self.folder / "clock").exists():
            (self.folder / "clock").write_bytes(_CLOCK.pack(0.0))
        path = os.pathsep.join([str(hooks), str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {FOLDER: str(self.folder), PAUSE: str(pause_s), "PYTHONPATH": path}

    def set_clock(self, seconds: float) -> None:
        with (self.folder / "clock").open("r+b") as file:
            file.write(_CLOCK.pack(seconds))

    def set_storage(self, fault: StorageFault | None) -> None:
        if fault is None:
            (self.folder / "requests").unlink(missing_ok=True)
        else:
            self._write("requests", json.dumps(asdict(fault)))

    def order(self, pid: int, what: str) -> None:
        """What a worker is to do before its next update."""
        self._write(f"do-{pid}", what)

    def _write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.new").write_text(text)
        (self.folder / f"{name}.new").replace(self.folder / name)


def install() -> None:
    """Prepare this process, and those that it forks."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    with suppress(OSError):
        _bend_clock(Path(folder) / "clock")
    changes: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": partial(_watch_updates, Path(folder), float(os.environ.get(PAUSE, "0"))),
        "elastictrain.storage.failures": partial(_watch_requests, Path(folder) / "requests"),
    }
    sys.meta_path.insert(0, _ChangingFinder(changes))


class _ChangingFinder(importlib.abc.MetaPathFinder):
    """Calls a function with each of some modules when it has been loaded."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for modules that are not changed: the next finder finds them."""
        change = self._changes.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _bend_clock(path: Path) -> None:
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), _CLOCK.size, prot=mmap.PROT_READ)
    real = time.time
    time.time = lambda: real() + _CLOCK.unpack_from(offset)[0]


def _watch_requests(path: Path, module: Any) -> None:
    """Let storage fail: `module` is elastictrain.storage.failures."""
    original = module.Retrying.call

    def call(self: object, request: Callable[[], object], *, action: str, url: str) -> object:
        def disturbed() -> object:
            _disturb(path, action)
            return request()

        return original(self, disturbed, action=action, url=url)

    module.Retrying.call = call


def _disturb(path: Path, action: str) -> None:
    try:
        fault = StorageFault(**json.loads(path.read_text()))
    except OSError:
        return
    if fault.only and action not in fault.only:
        return
    time.sleep(fault.slower_s)
    if random.random() < fault.refused:
        raise RefusedRequestError("injected: please reduce your request rate")


def _watch_updates(folder: Path, pause_s: float, module: Any) -> None:
    """Act before updates: `module` is torch.optim.optimizer."""

    def before_update(optimizer: Any, *_arguments: object) -> None:
        """Pauses, then carries out, once, what `HostControl.order` has left for this process."""
        time.sleep(pause_s)
        path = folder / f"do-{os.getpid()}"
        if not path.exists():
            return
        what, _space, share = path.read_text().partition(" ")
        path.unlink()
        if what == "hang":
            time.sleep(_FOREVER_S)
        elif what == "spin":
            # It tries as many ways as there are, in C, and never gives the lock back.
            re.match(r"(a+)+$", "a" * 64 + "b")
        elif what == "flip":
            _flip_gradient(optimizer, float(share))

    module.register_optimizer_step_pre_hook(before_update)


def _flip_gradient(optimizer: Any, share: float) -> None:
    """A high bit of the fraction of one number, at this share of all of this rank's gradients."""
    import torch

    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    parameter = parameters[min(len(parameters) - 1, int(share * len(parameters)))]
    part = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
    bits = part.view(-1).view(torch.int32)
    bits[int(share * (bits.numel() - 1))] ^= 1 << 21
