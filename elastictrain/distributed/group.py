"""The process group of one generation: made over a fresh prefix, with two-phase timeouts, and ended cleanly."""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf

import torch
import torch.distributed as dist

from elastictrain.distributed.bounded import call_until
from elastictrain.distributed.device import Backend, settle
from elastictrain.distributed.store import PolledStore
from elastictrain.errors import TransportError
from elastictrain.identity import Identity
from elastictrain.torch_private import set_group_timeout
from elastictrain.torch_private_groups import init_fake_group, make_gloo_groups_by

logger = logging.getLogger(__name__)

_NCCL_MARGIN_S = 10.0
_CONNECT_MARGIN_S = 30.0
_PROBE_S, _REFUSED_PAUSE_S = 1.0, 0.02
FAKE = "fake"  # torch's name for a group without communication


@dataclass(frozen=True, slots=True)
class Group:
    """The training group of the default process group, and `control`, a gloo group for everything but the training step:
    collectives from elsewhere on the training's group would be paired with the wrong ones."""

    control: dist.ProcessGroup
    backend: Backend
    device: torch.device
    store: dist.Store | None = None  # kept alive: torch's groups do not hold the Python part of a store


def connect(identity: Identity, *, timeout_s: float) -> dist.Store:
    """The store that torchrun provides, or a private one in a world of one. Raises: TransportError naming the address. A frozen
    store host blocks this call for ever: `BoundedStore` bounds it. Without a listener the call ends later than `timeout_s`, so
    that the caller's bound reports first."""
    if not identity.launched:
        return dist.HashStore()
    if identity.launcher is not None:
        # Under torchrun rank 0 may have to make the store.
        _await_listener(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), limit_s=timeout_s)
    try:
        store: dist.Store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s + _CONNECT_MARGIN_S))))[0]
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"cannot reach the rendezvous store that torchrun named (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    return store


def _await_listener(host: str, port: str, *, limit_s: float) -> None:
    """Wait until the store accepts connections: torch's client sleeps for a second after each refusal. Other errors are left to
    that client."""
    until_s = time.monotonic() + limit_s
    # A caller that has given up meanwhile, in another thread, may have set another place.
    while port.isdecimal() and port == os.environ.get("MASTER_PORT") and time.monotonic() < until_s:
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            time.sleep(_REFUSED_PAUSE_S)
        except OSError:
            return
        else:
            return


def make_group(
    store: dist.Store,
    identity: Identity,
    *,
    backend: Backend,
    on_gpu: bool | None = None,
    connects_later: bool = False,
    init_timeout_s: float,
    save_timeout_s: float,
    poll: Callable[[], None] = lambda: None,
) -> Group:
    """Make the training group and its control group over a store that no other generation uses. Collective: yes. `poll` is
    called while gloo waits for another rank or connects to it, here and where a group is made later, by two threads, and may
    raise to leave early; NCCL's threads use the store too, so NCCL gets it as it is, and waits for `init_timeout_s`.
    `connects_later`: NCCL connects in the first collective, and not here."""
    device = _use_device(identity, backend == "nccl" if on_gpu is None else on_gpu)
    if backend == "gloo":
        store = PolledStore(store, limit_s=init_timeout_s, poll=poll)
    # A rank that dies between the store and the connection lets the others wait in C++, some of them without a socket. With
    # NCCL the abandoned call could wait in the store instead, whose connection NCCL's threads use, too.
    make_gloo_groups_by(partial(call_until, left_s=lambda: inf, poll=poll) if backend == "gloo" else None)
    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=_collective_timeout(init_timeout_s, backend),
        # Binding the device makes NCCL connect now, while the generous timeout holds, and not inside the first step.
        device_id=device if backend == "nccl" and not connects_later else None,
    )
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(init_timeout_s, save_timeout_s)))
    return Group(control, backend, device, store)


def lone_group(identity: Identity, *, backend: Backend, on_gpu: bool) -> Group:
    """A group in which this process plays rank `identity.rank` of its world and communicates with nobody: collectives return at
    once and leave their results as they are. A standby builds, compiles and runs a step on it before it knows the other ranks;
    `reattach` then gives it real groups. Collective: no. Raises: HostUnfitError."""
    device = _use_device(identity, on_gpu)
    init_fake_group(rank=identity.rank, world_size=identity.world_size)
    control: dist.ProcessGroup = dist.new_group(backend=FAKE)
    return Group(control, backend, device)


def limit_collectives(groups: Sequence[dist.ProcessGroup], *, backend: Backend, timeout_s: float) -> None:
    """From now on a collective of the default group and of `groups` fails after `timeout_s`. Groups begin with a generous
    timeout, since start-up, restore and compilation take minutes and differ between ranks; the first step ends it."""
    if dist.get_backend() == FAKE:
        # Nothing is waited for.
        return
    for group in (None, *groups):
        set_group_timeout(group, _collective_timeout(timeout_s, backend))


def _use_device(identity: Identity, on_gpu: bool) -> torch.device:
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", identity.local_rank)
    torch.cuda.set_device(device)
    return device


def _collective_timeout(timeout_s: float, backend: Backend) -> timedelta:
    # NCCL's own watchdog ends the process without a readable reason. It comes second: our watchdog is faster.
    return timedelta(seconds=timeout_s + (_NCCL_MARGIN_S if backend == "nccl" else 0.0))


def await_all(group: Group) -> None:
    """Wait until no rank needs another one. Collective: yes."""
    dist.barrier(group=group.control)
    settle(group.device)


def leave(group: Group) -> None:
    """Wait until no rank needs another one, then destroy the group. Collective: yes."""
    await_all(group)
    dist.destroy_process_group()
    make_gloo_groups_by(None)
