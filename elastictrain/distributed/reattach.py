"""Exchanges the process groups under a model that is already built, so that its process, memory and compiled code stay.

When a rank dies, each survivor calls `detach` from a thread, whatever its main thread is blocked in. The main thread then
raises out of its step, calls `forget_step`, makes a new default group, and calls `reattach`. A newcomer is built on a
`lone_group` and comes to its first real group the same way: survivors take no part in what DDP communicates when it is made.
"""

import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastictrain.distributed.gloo_sockets import cut_gloo_connections
from elastictrain.distributed.wrapping import Wrapped, Wrapping, settle_buckets
from elastictrain.torch_private_groups import abort_groups, clear_fsdp, forget_groups, move_ddp, move_fsdp

_POLL_S = 0.01


def detach(limit_s: float) -> None:
    """Abort the communicators of all groups of this process and forget the groups, from any thread. What is blocked in a
    collective raises; a device that is stuck in one becomes idle. A thread that is *making* a group may have connected after
    this call looked: call it again as long as that thread does not raise. Collective: no. Raises: TimeoutError after `limit_s`
    seconds, in which case only the end of the process helps; HostUnfitError."""
    errors: list[BaseException] = []
    thread = threading.Thread(target=_abort, args=(errors,), name="abort-groups", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    while thread.is_alive():
        cut_gloo_connections()
        thread.join(min(_POLL_S, max(0.0, deadline - time.monotonic())))
        if thread.is_alive() and time.monotonic() >= deadline:
            raise TimeoutError(f"the process groups were not aborted in {limit_s:g} s")
    if errors:
        raise errors[0]


def _abort(errors: list[BaseException]) -> None:
    try:
        cut_gloo_connections()
        abort_groups()
    except BaseException as error:  # noqa: BLE001  # raised by `detach`
        errors.append(error)


def forget_step(wrapped: Wrapped) -> None:
    """Clear what a step that was cut short left in the wrappers, and all gradients; parameters keep whatever values they have.
    Blocks until the device is idle. Main thread, after `detach`. Collective: no. Raises: HostUnfitError."""
    device = next(wrapped.bare.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    forget_groups()  # a group whose creation was cut short may have been recorded after `detach`
    clear_fsdp(wrapped.bare)
    for parameter in wrapped.bare.parameters():
        parameter.grad = None


def reattach(wrapping: Wrapping, wrapped: Wrapped) -> Wrapped:
    """Put the groups of the new default group under the old wrappers. The world size is that of `wrapped`; the rank too, unless
    every sharded dimension divides evenly. DDP keeps its buckets, and lays them out as a new DDP does. Parameters and buffers
    are not touched: the caller restores them. Collective: yes. Raises: ValueError if world or rank do not fit; HostUnfitError.
    """
    if wrapping.shape != wrapped.shape or dist.get_world_size() != wrapped.shape.world_size:
        raise ValueError(f"the model is built for {wrapped.shape}, not for {wrapping.shape} in {dist.get_world_size()} ranks")
    if isinstance(wrapped.module, DistributedDataParallel):
        if dist.group.WORLD is None:
            raise ValueError("there is no default group")
        move_ddp(wrapped.module, dist.group.WORLD)
        settle_buckets(wrapped.module)
    elif wrapping.parallel.kind != "ddp":
        mesh = wrapping.make_mesh()
        _check_place(wrapped.bare, mesh.get_rank(), shards=wrapped.shape.shards)
        move_fsdp(wrapped.bare, mesh)
        wrapped = replace(wrapped, groups=tuple(mesh.get_all_groups()))
    return wrapped


def _check_place(model: nn.Module, rank: int, *, shards: int) -> None:
    """Raises: ValueError if a rank other than the one for which `model` was built would hold shards of other sizes."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        built_for = parameter.device_mesh.get_rank()
        if built_for % shards != rank % shards and parameter.shape[0] % shards:  # the last dimension of the mesh shards
            shape = tuple(parameter.shape)
            raise ValueError(
                f"{name} {shape} is not even over {shards} ranks: built for rank {built_for}, it cannot be rank {rank}'s"
            )
