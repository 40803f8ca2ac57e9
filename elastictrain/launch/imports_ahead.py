"""What a fork server imports before it forks workers: all that they need, with one thread and no device left behind."""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastictrain.entry_point import split_program
from elastictrain.torch_private import COMPILER, prepare_compiler

if TYPE_CHECKING:
    from elastictrain.config.compose import Composed

AHEAD = (
    COMPILER,
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "elastictrain.config.load",
    "elastictrain.own_loop.run",
    "elastictrain.train.worker",
)
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_DEVICES = ("/dev/nvidia", "/dev/kfd")
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class ImportedAhead:
    unfit: str = ""  # why this host is unfit, if torch cannot be imported
    composed: "Composed | None" = None  # the workers' configuration, which takes 0.3 s to compose; None if it is wrong
    later: bool = False  # whether the compiler is still to be imported


def import_ahead(arguments: Sequence[str] = (), modules: Sequence[str] = AHEAD) -> ImportedAhead:
    """Import what workers with these `arguments` import. Where an import other than torch's fails, or the configuration is
    wrong, the workers fail at it themselves and report it. With GPUs the compiler is left for `import_compiler`: the first
    workers import it while their GPUs are examined."""
    composed, later = None, False
    with _numpy_without_threads():
        try:
            importlib.import_module("torch")
        except Exception as error:  # noqa: BLE001  # an incomplete installation may raise anything
            return ImportedAhead(f"torch cannot be imported: {summary(error)}; install it anew")
        with suppress(Exception):
            from elastictrain.config.compose import compose

            composed = compose(split_program(arguments)[0])
        with suppress(Exception):
            for name in modules:
                importlib.import_module(name)
        if _compiles(composed):
            later = _has_driver()
            if not later:
                import_compiler()
    return ImportedAhead("", composed, later)


def import_compiler() -> None:
    """What workers compile with, for all that are forked from now on."""
    with _numpy_without_threads(), _devices_untouched():
        prepare_compiler()


def _compiles(composed: "Composed | None") -> bool:
    train = composed.tree.get("train") if composed is not None else None
    return isinstance(train, Mapping) and train.get("compile") is True


def _has_driver() -> bool:
    return any(map(os.path.exists, _DRIVERS))


@contextmanager
def _numpy_without_threads() -> Iterator[None]:
    """numpy starts OMP_NUM_THREADS threads when torch imports it, and a process with threads must not fork."""
    ours = _NUMPY_THREADS not in os.environ
    os.environ.setdefault(_NUMPY_THREADS, "1")
    try:
        yield
    finally:
        if ours:
            del os.environ[_NUMPY_THREADS]


@contextmanager
def _devices_untouched() -> Iterator[None]:
    """torch 2.11 asks for GPUs when its compiler is imported, which opens devices; that there is a driver says as much."""
    import torch

    ask = torch.cuda.is_available
    torch.cuda.is_available = _has_driver
    try:
        yield
    finally:
        torch.cuda.is_available = ask


def why_no_fork(process: Path = Path("/proc/self")) -> str:
    """Why a fork cannot use this process's state: another thread may hold a lock, or a device is open. Empty if it can."""
    try:
        threads = list((process / "task").iterdir())
        files = list((process / "fd").iterdir())
    except OSError as error:
        return f"threads and open files of the fork server cannot be read: {error.strerror}"
    if len(threads) != 1:
        return f"the fork server has {len(threads)} threads where its imports should have left one"
    devices = set()
    for file in files:
        # The descriptor of the listed folder itself is closed by now.
        with suppress(OSError):
            if (target := str(file.readlink())).startswith(_DEVICES):
                devices.add(target)
    return f"the fork server has opened {', '.join(sorted(devices))} while it imported what workers need" if devices else ""


def summary(error: Exception) -> str:
    """Kind of the error and its first line; errors from C++ continue with a stack."""
    first = next(iter(str(error).splitlines()), "")
    kind = type(error).__name__
    return f"{kind}: {first}"[:_LONGEST] if first else kind
