"""Uses of torch without a stability promise: private names, and hooks into them. Those that exchange process groups are in
`torch_private_groups`.

Each is checked before use, by name and by parameters; if torch has changed, a sentence names what is missing. Functions import
torch, the module does not.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elastictrain.errors import HostUnfitError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.tensor import DTensor

COMPILER = "torch._dynamo"  # the module that torch compiles with; the first optimizer imports it
_LAUNCHER = "use_static_cuda_launcher"  # an option of the compiler
INDUCTOR = "torch._inductor.compile_fx"  # what that module calls for each graph; `torch.compile` imports it


@dataclass(frozen=True, slots=True)
class PrivateName:
    """`name` may have dots: an attribute of an attribute. `parameters`: its first ones, by name; None if they cannot be
    inspected (C++) or do not matter."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    def find(self) -> Any:  # whatever torch has there
        """The callable; None if it does not exist."""
        try:
            found: object = importlib.import_module(self.module)
        except ImportError:
            return None
        for part in self.name.split("."):
            found = getattr(found, part, None)
        return found if callable(found) else None

    def change(self) -> str | None:
        """What the installed torch lacks of it, or takes instead, as a sentence."""
        found, full_name = self.find(), f"{self.module}.{self.name}"
        if found is None:
            return f"{_torch()} has no {full_name}"
        if self.parameters is None:
            return None
        try:
            takes = list(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            return f"{_torch()}: {full_name} does not say what it takes"
        if takes[: len(self.parameters)] == list(self.parameters):
            return None
        return f"{_torch()}: {full_name} takes ({', '.join(takes)}), not ({', '.join(self.parameters)})"


PLACEMENT = (
    PrivateName(
        "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", ("global_shape", "mesh", "placements")
    ),
)
"""Which part of a tensor a rank holds."""

COMPILATIONS = (
    PrivateName(f"{COMPILER}.callback", "callback_handler.register_start_callback", ("callback",)),
    PrivateName(f"{COMPILER}.callback", "callback_handler.register_end_callback", ("callback",)),
)
"""Begin and end of each compilation by torch."""

HASHES = (
    PrivateName("torch._inductor.codecache", "torch_key"),
    PrivateName("torch._inductor.runtime.triton_compat", "triton_key"),
)
"""Those of the files of torch and of Triton, for the compiler's caches: computed once by each process. Without Triton the
second one raises."""

ENGINE = (PrivateName("torch.autograd", "Variable._execution_engine.queue_callback"),)
"""What to call when a backward pass has done its work."""

# The last collectives. Only CUDA builds have the second recorder, for those of NCCL.
FLIGHT_RECORDER = (PrivateName("torch._C._distributed_c10d", "_dump_fr_trace_json"),)
_NCCL_FLIGHT_RECORDER = "_dump_nccl_trace_json"

_ALLOWED_IN_CACHE = "unsafe_marked_cacheable_functions"

# Public from 2.14 on, which warns where the private one is used.
_PUBLIC_TIMEOUT = PrivateName("torch.distributed", "set_timeout", ("timeout", "group"))
_PRIVATE_TIMEOUT = PrivateName("torch.distributed.distributed_c10d", "_set_pg_timeout", ("timeout", "group"))


def find_changes(names: Sequence[PrivateName]) -> tuple[str, ...]:
    """One sentence for each name that the installed torch lacks, or that takes other parameters."""
    return tuple(change for name in names if (change := name.change()) is not None)


def timeout_names() -> tuple[PrivateName, ...]:
    """The names with which the installed torch changes a group's timeout."""
    return (_PUBLIC_TIMEOUT,) if _PUBLIC_TIMEOUT.find() is not None else (_PRIVATE_TIMEOUT,)


def set_group_timeout(group: "dist.ProcessGroup | None", timeout: timedelta) -> None:
    """Let collectives of this group (None: the default one) fail after `timeout`. Raises: HostUnfitError."""
    (name,) = timeout_names()
    require((name,))
    name.find()(timeout, group)


def local_box(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of the part of `tensor` on this rank. Raises: HostUnfitError."""
    require(PLACEMENT)
    sizes, offsets = PLACEMENT[0].find()(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(sizes), tuple(offsets)


def after_backward(loss: "Tensor", act: Callable[[], None]) -> None:
    """Call `act` when all gradients of the next backward pass from `loss` are computed, in that pass and its stream, before DDP
    waits for their reduction. Source: torch's engine calls what was queued in the order of queueing, and DDP queues its wait
    with its last gradient. Never, if this torch has no such queue."""
    if (queue := ENGINE[0].find()) is not None:
        loss.register_hook(lambda _: queue(act))  # type: ignore[no-untyped-call]


def flight_recorder() -> str | None:
    """The last collectives of this rank as JSON, NCCL's first; None if no recorder of this build has any."""
    import torch

    for name in (_NCCL_FLIGHT_RECORDER, FLIGHT_RECORDER[0].name):
        dump = getattr(torch._C._distributed_c10d, name, None)
        trace = dump() if dump is not None else ""
        text = trace.decode() if isinstance(trace, bytes) else str(trace)
        if '"entries"' in text:
            return text
    return None


def follow_compilations(*, begins: Callable[[], None], ends: Callable[[], None]) -> tuple[str, ...]:
    """Call the hooks from now on if this process compiles: without compilation the import is not paid for. Returns what torch
    lacks for that, in which case they are not called."""
    if COMPILER not in sys.modules:
        return ()
    if changes := find_changes(COMPILATIONS):
        return changes
    for name, tell in zip(COMPILATIONS, (begins, ends), strict=True):
        name.find()(lambda _, tell=tell: tell())
    return ()


def prepare_compiler() -> None:
    """What the first `torch.compile` of a process does before it compiles anything: a second or two, without a device. Never
    raises: what fails here fails there, too."""
    with suppress(Exception):
        importlib.import_module(INDUCTOR)
    for name in HASHES:
        with suppress(Exception):
            name.find()()


def cache_attention_graphs() -> bool:
    """Let torch's cache hold graphs with `sdpa_kernel`, too; returns whether this torch can.

    The context manager leaves two private functions in the graph, which torch does not know as safe to cache. Their result
    follows from their arguments, which are part of the key.
    """
    config = importlib.import_module("torch._inductor.config")
    allowed = getattr(config, _ALLOWED_IN_CACHE, None)
    names = ("_backend_from_string", "_sdpa_kernel")
    if not isinstance(allowed, dict) or any(PrivateName("torch.nn.attention", name).find() is None for name in names):
        return False
    setattr(config, _ALLOWED_IN_CACHE, allowed | {f"torch.nn.attention.{name}": _torch() for name in names})
    return True


def launch_without_lock() -> bool:
    """Have compiled kernels launched by Triton's launcher, which gives up the interpreter lock; returns whether this torch has
    another one. That one keeps the lock while a device whose peer has died takes no more work, so that no thread of the process
    could abort the groups. A person's choice is kept."""
    config = importlib.import_module("torch._inductor.config")
    if f"TORCHINDUCTOR_{_LAUNCHER.upper()}" in os.environ or not hasattr(config, _LAUNCHER):
        return False
    setattr(config, _LAUNCHER, False)
    return True


def require(names: Sequence[PrivateName]) -> None:
    """Raises: HostUnfitError if the installed torch lacks one of them, or takes other parameters."""
    if changes := find_changes(names):
        raise HostUnfitError(f"{'; '.join(changes)}. Install a torch that this version was tested with (README.md names them)")


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def multiply(tensors: "Sequence[Tensor]", factor: "Tensor") -> None:
    """Multiply all of `tensors` in place by `factor` [], in one kernel on a device."""
    import torch

    torch._foreach_mul_(list(tensors), factor)


def largest_values(tensors: "Sequence[Tensor]") -> "Tensor":
    """The largest magnitude in each of `tensors`, in few kernels on a device."""
    import torch

    return torch.stack(torch._foreach_norm(list(tensors), float("inf")))
