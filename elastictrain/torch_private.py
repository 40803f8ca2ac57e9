"""All that is used of torch without its promise that it stays: private names, and hooks into them.

Each is checked before it is used, by name and by parameters. Where torch has changed, the sentence says what is missing.
Functions import torch, the module does not.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elastictrain.errors import HostUnfitError

if TYPE_CHECKING:
    import signal
    import subprocess

    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

COMPILER = "torch._dynamo"
"""The module that torch compiles with; the first optimizer imports it."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """`name` may have dots: an attribute of an attribute. `parameters`: the first ones that it takes, by name; None for what
    cannot be asked (C++) or does not matter. `exact`: whether it takes no others: those that are overridden."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    exact: bool = False

    def find(self) -> Any:  # whatever torch has there
        """None if there is nothing that can be called."""
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
        if takes[: None if self.exact else len(self.parameters)] == list(self.parameters):
            return None
        return f"{_torch()}: {full_name} takes ({', '.join(takes)}), not ({', '.join(self.parameters)})"


_API = "torch.distributed.elastic.multiprocessing.api"
_HANDLERS = "torch.distributed.elastic.multiprocessing.subprocess_handler"
WORKER_START = (
    PrivateName(_API, "get_subprocess_handler", ("entrypoint", "args", "env", "stdout", "stderr", "local_rank_id")),
    PrivateName(_HANDLERS, "SubprocessHandler._popen", ("self", "args", "env"), exact=True),
    PrivateName(_HANDLERS, "SubprocessHandler.close", ("self", "death_sig"), exact=True),
)
"""How torchrun starts a worker and ends it."""

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
"""When torch begins to compile, and when it is through."""

FLIGHT_RECORDER = (PrivateName("torch._C._distributed_c10d", "_dump_fr_trace_json"),)
"""The last collectives. A build for CUDA has another recorder for those of NCCL, which others lack."""

_NCCL_FLIGHT_RECORDER = "_dump_nccl_trace_json"

AGENT_RECORD = "torchelastic/role_info/"
"""The key of what each torchrun says of itself in the store, without its node rank."""

_FIND_AGENTS = timedelta(minutes=10)
"""Longer than anybody waits: at its end the store's client prints a stack of C++ frames."""

# Public from 2.14 on, which warns where the private one is used.
_PUBLIC_TIMEOUT = PrivateName("torch.distributed", "set_timeout", ("timeout", "group"))
_PRIVATE_TIMEOUT = PrivateName("torch.distributed.distributed_c10d", "_set_pg_timeout", ("timeout", "group"))


def find_changes(names: Sequence[PrivateName]) -> tuple[str, ...]:
    """For each of these that the installed torch lacks, or that takes something else: a sentence."""
    return tuple(change for name in names if (change := name.change()) is not None)


def timeout_names() -> tuple[PrivateName, ...]:
    """Those by which the installed torch changes the timeout of a group."""
    return (_PUBLIC_TIMEOUT,) if _PUBLIC_TIMEOUT.find() is not None else (_PRIVATE_TIMEOUT,)


def set_group_timeout(group: "dist.ProcessGroup | None", timeout: timedelta) -> None:
    """From now on a collective of this group (None: the default one) fails after `timeout`. Raises: HostUnfitError."""
    (name,) = timeout_names()
    _require((name,))
    name.find()(timeout, group)


def local_box(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of the part that this rank holds. Raises: HostUnfitError."""
    _require(PLACEMENT)
    sizes, offsets = PLACEMENT[0].find()(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(sizes), tuple(offsets)


def read_flight_recorders() -> tuple[str, ...]:
    """What each recorder of collectives that this build of torch has says, NCCL's first."""
    import torch

    found = []
    for name in (_NCCL_FLIGHT_RECORDER, FLIGHT_RECORDER[0].name):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            trace = dump()
            found.append(trace.decode() if isinstance(trace, bytes) else str(trace))
    return tuple(found)


def follow_compilations(*, begins: Callable[[], None], ends: Callable[[], None]) -> tuple[str, ...]:
    """Have these called from now on if this process compiles: what runs without does not pay for the import.

    Returns what torch lacks for that, in which case they are not called.
    """
    if COMPILER not in sys.modules:
        return ()
    if changes := find_changes(COMPILATIONS):
        return changes
    for name, tell in zip(COMPILATIONS, (begins, ends), strict=True):
        name.find()(lambda _, tell=tell: tell())
    return ()


def intercept_workers(
    *,
    start: Callable[[tuple[str, ...], dict[str, str]], "subprocess.Popen[bytes] | None"],
    leaves_by_itself: Callable[["subprocess.Popen[bytes]"], bool],
) -> tuple[str, ...]:
    """Have the torchrun in this process start its workers by `start`; where that gives None it starts them itself.

    Before it asks one to end, other than by SIGKILL, `leaves_by_itself` says whether it has to. Returns what torch lacks for
    that, in which case torchrun is as it was.
    """
    changes = find_changes(WORKER_START)
    if changes:
        return changes
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    made, makes = (list(inspect.signature(one).parameters) for one in (api.get_subprocess_handler, SubprocessHandler))
    if made != makes:
        return (f"{_torch()}: {_API}.get_subprocess_handler takes ({', '.join(made)}), SubprocessHandler ({', '.join(makes)})",)

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
            streams = vars(self)
            plain = all(streams.get(name, "unknown") is None for name in ("_stdout", "_stderr"))
            worker = start(args, env) if plain else None
            return super()._popen(args, env) if worker is None else worker

        def close(self, death_sig: "signal.Signals | None" = None) -> None:
            from signal import SIGKILL

            if death_sig == SIGKILL or not leaves_by_itself(self.proc):
                super().close(death_sig)

    api.get_subprocess_handler = Handler  # type: ignore[assignment]  # it takes what the function took
    return ()


def find_agents(address: str, port: int, *, run_id: str, count: int) -> frozenset[int]:
    """Which of `count` torchruns have come to a static rendezvous, by node rank: each leaves a record in its store.

    A store whose host is frozen keeps this call for ever, and one that cannot be reached for minutes. Raises: RuntimeError.
    """
    import torch.distributed as dist

    client = dist.TCPStore(address, port, is_master=False, timeout=_FIND_AGENTS, wait_for_workers=False)
    store = dist.PrefixStore(run_id, client)
    return frozenset(place for place in range(count) if store.check([f"{AGENT_RECORD}{place}"]))


def _require(names: Sequence[PrivateName]) -> None:
    if changes := find_changes(names):
        raise HostUnfitError(f"{'; '.join(changes)}. Install a torch that this version was tested with (README.md names them)")


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"
