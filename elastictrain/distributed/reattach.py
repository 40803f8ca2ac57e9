"""Exchanges the process groups under a model that is already built, so that its process, memory and compiled code stay.

When a rank dies, each survivor calls `detach` from a thread, whatever its main thread is blocked in. The main thread then
raises out of its step, calls `forget_step`, makes a new default group, and calls `reattach`. A standby is built on a
`lone_group` and comes to its first real group the same way. A newcomer may also be built on the new group itself, with
`Wrapping.wrap` and `finish`: these communicate as `reattach` does.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastictrain.distributed.device import settle
from elastictrain.distributed.gloo_sockets import cut_gloo_connections
from elastictrain.distributed.wrapping import Wrapped, Wrapping, attach_ddp
from elastictrain.errors import ConfigError, Problem
from elastictrain.torch_private_groups import clear_fsdp, forget_groups, keep_mesh, move_fsdp, take_groups

logger = logging.getLogger(__name__)

_POLL_S = 0.01

_detaching = threading.Lock()  # torch's registry of groups is not made for two threads


class _Abort(threading.Thread):
    """The abort of one group. Each has a thread: an abort may wait for the collectives of another group to end."""

    def __init__(self, group: dist.ProcessGroup, *, is_awaited: bool) -> None:
        super().__init__(name="abort-group", daemon=True)
        self._group: dist.ProcessGroup | None = group
        self.is_awaited = is_awaited  # whether the groups are left only once it has ended
        self.error: Exception | None = None  # of one that was awaited from the beginning

    def run(self) -> None:
        """Never raises: `detach` reports what failed, or the log does."""
        is_awaited = self.is_awaited
        try:
            assert self._group is not None  # noqa: S101
            self._group.abort()
        except Exception as error:  # noqa: BLE001
            if is_awaited:
                self.error = error
            else:
                logger.warning("a communicator of an earlier generation could not be taken down: %s", error)
        self._group = None


_aborts: list[_Abort] = []  # those of the groups that were found last, and older ones that have not ended


def detach(limit_s: float) -> None:
    """Abort the communicators of all groups of this process and forget the groups, from any thread. What is blocked in a
    collective raises. A device that is stuck in one becomes idle and leaves arbitrary figures: whoever reads figures from it
    must ask afterwards whether the groups were aborted meanwhile. A thread that is *making* a group leaves through the `poll`
    of `make_group`. NCCL takes its communicators down beside what follows, until the next call. Collective: no. Raises:
    TimeoutError after `limit_s` seconds, in which case only the end of the process helps; HostUnfitError."""
    with _detaching:
        _detach(limit_s)


def _detach(limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    cut_gloo_connections()
    if groups := take_groups():
        _aborts[:] = [one for one in _aborts if one.is_alive()]
        for abort in _aborts:
            abort.is_awaited = True
        # NCCL's abort frees the device at once, and then waits up to a second for threads of its own, beside the next
        # generation. That one cannot be left before.
        for group, backend in groups:
            _aborts.append(_Abort(group, is_awaited=backend != "nccl"))
            _aborts[-1].start()
    # A connection may be made, or be hidden by one that is closed, while this looks: until there is none twice in a row.
    while (awaited := [one for one in _aborts if one.is_awaited and one.is_alive()]) or (
        cut_gloo_connections() or cut_gloo_connections()
    ):
        for abort in awaited[:1]:
            abort.join(_POLL_S)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the process groups were not aborted in {limit_s:g} s")
    # Each caller learns of it: the main thread is not the first one.
    for error in filter(None, [one.error for one in _aborts]):
        raise error


def forget_step(model: nn.Module) -> None:
    """Clear what a step that was cut short left in the wrappers, and all gradients; parameters keep whatever values they have.
    `model` is the one inside DDP. Blocks until the device is idle. Main thread, after `detach`. Collective: no. Raises:
    HostUnfitError."""
    settle(next(model.parameters()).device)
    forget_groups()  # a group whose creation was cut short may have been recorded after `detach`
    clear_fsdp(model)
    for parameter in model.parameters():
        parameter.grad = None


def reattach(wrapping: Wrapping, wrapped: Wrapped) -> Wrapped:
    """Put the groups of the new default group under the old wrappers. The world size is that of `wrapped`; the rank too, unless
    every sharded dimension divides evenly. DDP keeps its buckets, and lays them out as a new DDP does. Parameters and buffers
    are not touched: the caller restores them. Collective: yes. Raises: ValueError if world or rank do not fit; HostUnfitError.
    """
    if wrapping.shape != wrapped.shape or dist.get_world_size() != wrapped.shape.world_size:
        raise ValueError(f"the model is built for {wrapped.shape}, not for {wrapping.shape} in {dist.get_world_size()} ranks")
    if isinstance(wrapped.module, DistributedDataParallel):
        attach_ddp(wrapped.module, fresh=False)
    elif wrapping.parallel.kind != "ddp":
        built_for = _place(wrapped.bare)
        mesh = wrapping.make_mesh()
        move_fsdp(wrapped.bare, mesh)
        _check_place(wrapped.bare, built_for)
        wrapped = replace(wrapped, groups=tuple(mesh.get_all_groups()))
    return wrapped


def exchange_groups(models: Iterable[nn.Module], *, fresh: bool) -> None:
    """Put the groups of the default group under wrappers of a user's: DDP, and FSDP2 over a mesh of all ranks. `fresh`: this
    process has just made them; where all have, DDP begins with the values of rank 0. Collective: yes. Raises: ConfigError for
    another mesh, and for a DDP that fixes its graph in its first pass; HostUnfitError."""
    for model in models:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                if module.static_graph:
                    raise ConfigError([Problem("model", "must be wrapped without static_graph=True to be recoverable")])
                attach_ddp(module, fresh=fresh)
        meshes = [*{id(one): one for one in map(keep_mesh, _meshes_of(model))}.values()]
        if not meshes:
            continue
        mesh, *others = meshes
        if others or mesh.size() != dist.get_world_size():
            message = f"must be sharded over one mesh of all {dist.get_world_size()} ranks to be recoverable, but has "
            raise ConfigError([Problem("model", message + ", ".join(map(str, meshes)))])
        names = mesh.mesh_dim_names
        move_fsdp(model, keep_mesh(init_device_mesh(mesh.device_type, tuple(mesh.shape), mesh_dim_names=names)))


def _check_place(model: nn.Module, built_for: int) -> None:
    """Raises: ValueError if this rank's place in the mesh would hold shards of other sizes than those of `model`."""
    place = _place(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and place != built_for and parameter.shape[0] % parameter.device_mesh.size(-1):
            shape = tuple(parameter.shape)
            raise ValueError(f"{name} {shape} is not even: what was built for shard {built_for} cannot be shard {place}")


def _place(model: nn.Module) -> int:
    """Which shard this rank holds: its coordinate in the last dimension of the mesh."""
    coordinate = next(_meshes_of(model)).get_coordinate()
    assert coordinate is not None  # noqa: S101  # all ranks are in the mesh
    return coordinate[-1]


def _meshes_of(model: nn.Module) -> Iterator[DeviceMesh]:
    return (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
