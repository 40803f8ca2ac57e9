"""Private names of torch with which process groups under a model are exchanged: c10d's registry, FSDP2, DDP, the fake group.

They are checked before use like those of `torch_private`. The attributes of FSDP's objects exist in instances only, so they are
checked on the model that is at hand.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from elastictrain.errors import HostUnfitError, TransportError
from elastictrain.torch_private import PrivateName, require

_C10D = "torch.distributed.distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"

REGISTRY = (
    PrivateName(_C10D, "_update_default_pg", ("pg",)),
    PrivateName(_C10D, "_unregister_all_process_groups"),
    *(
        PrivateName(_C10D, f"_world.{name}.clear")
        for name in (
            "pg_map",
            "pg_names",
            "pg_group_ranks",
            "pg_backend_config",
            "pg_to_tag",
            "tags_to_pg",
            "pg_coalesce_state",
        )
    ),
)
"""c10d's record of the groups of this process."""

DDP = (
    PrivateName("torch.nn.parallel", "DistributedDataParallel._update_process_group", ("self", "new_process_group")),
    PrivateName("torch.distributed", "Reducer._rebuild_buckets"),
)

FSDP = (
    PrivateName("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", ("self",)),
    PrivateName(f"{_FSDP}._fsdp_param", "FSDPParam.to_sharded", ("self",)),
    PrivateName(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup._to_sharded", ("self",)),
    PrivateName(f"{_FSDP}._fsdp_common", "FSDPMeshInfo.__post_init__", ("self",)),
    PrivateName(f"{_FSDP}._fsdp_common", "HSDPMeshInfo.__post_init__", ("self",)),
)

GATHERS = (
    PrivateName(f"{_FSDP}._fsdp_param", "FSDPParam.reset_sharded_param", ("self",)),
    PrivateName(f"{_FSDP}._fsdp_param", "FSDPParam._init_extensions", ("self",)),
)
"""What gathers parameters in another form than they have."""

GLOO = (PrivateName(_C10D, "ProcessGroupGloo"),)
"""What torch calls to make a group of gloo."""

FAKE_GROUP = (PrivateName("torch.testing._internal.distributed.fake_pg", "FakeStore"),)
"""Its module registers the backend `fake`."""

# What a step leaves in FSDP when it is cut short, by the object that has it: attributes that become None, and collections that
# become empty. Names joined by a bar are the same thing in different versions of torch.
_GROUP_NONE = (
    "_all_gather_result",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_all_reduce_state",
)
_GROUP_EMPTY = ("_post_forward_indices",)
_GROUP_COMMUNICATES = ("_all_gather_comm", "_reduce_scatter_comm")
_CONTEXT_NONE = ("all_gather_state",)
_CONTEXT_EMPTY = ("post_forward_order", "reduce_scatter_states|reduce_scatter_state")
_CONTEXT_EMPTY_IF_ANY = "_last_post_reduce_events"  # not before 2.13


_meshes: list[DeviceMesh] = []  # all different ones that this process has made


def take_groups() -> list[tuple[dist.ProcessGroup, str]]:
    """Forget all groups of this process; returns them with the names of their backends, the newest first, for the caller to
    abort. Raises: HostUnfitError."""
    require(REGISTRY)
    groups = [(group, str(dist.get_backend(group))) for group in reversed([*dist.distributed_c10d._world.pg_map])]
    forget_groups()
    return groups


def forget_groups() -> None:
    """Forget all groups, also those whose creation was cut short, so that names begin anew. Raises: HostUnfitError."""
    require(REGISTRY)
    world = dist.distributed_c10d._world
    REGISTRY[0].find()(None)
    for name in REGISTRY[1:]:
        name.find()()
    world.group_count = 0


class _GlooGroups:
    """Stands for torch's class of gloo's groups, and has them made by `make`."""

    def __init__(self, usual: Any) -> None:
        self.usual = usual
        self.make: Callable[[Callable[[], Any]], Any] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        construct = partial(self.usual, *arguments, **options)
        return construct() if self.make is None else self.make(construct)

    def __instancecheck__(self, one: object) -> bool:
        return isinstance(one, self.usual)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual, name)


def make_gloo_groups_by(make: Callable[[Callable[[], Any]], Any] | None) -> None:
    """From now on torch makes groups of gloo in `make`, which calls its argument for one: that connects to all ranks, and may
    never return. None: as usual. Raises: HostUnfitError."""
    c10d: Any = dist.distributed_c10d
    require(GLOO)
    if not isinstance(c10d.ProcessGroupGloo, _GlooGroups):
        c10d.ProcessGroupGloo = _GlooGroups(c10d.ProcessGroupGloo)
    c10d.ProcessGroupGloo.make = make


def init_fake_group(*, rank: int, world_size: int) -> None:
    """Make a default group whose collectives return at once and communicate with nobody. Raises: HostUnfitError."""
    require(FAKE_GROUP)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)


def move_ddp(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Have DDP reduce over `group` and forget the pass that was cut short; the buckets are laid out anew in the next pass.
    Raises: HostUnfitError."""
    require(DDP)
    DDP[0].find()(ddp, group)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Lay out the buckets in the order in which the last pass finished its gradients, as the next forward pass would.
    Collective: yes. Raises: HostUnfitError."""
    require(DDP)
    DDP[1].find()(ddp.reducer)


def keep_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The one DeviceMesh object of this process that equals `mesh`, with the groups of `mesh`. DTensor caches give results the
    mesh object of the first tensor that had an equal one, also if that was another model's."""
    kept = next((one for one in _meshes if one == mesh), None)
    if kept is None:
        _meshes.append(mesh)
        return mesh
    _give_groups(kept, mesh)
    return kept


def move_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have FSDP2 and the DTensors of `model` communicate over the groups of `mesh`, which has the old one's shape: all of them
    refer to one DeviceMesh object, which takes the attributes of `mesh`. Raises: HostUnfitError."""
    infos = {}
    for _, group in _param_groups(model):
        for part in (group, *group.fsdp_params):
            for info in (part.mesh_info, part.post_forward_mesh_info):
                if info is not None:
                    infos[id(info)] = info
    for old in {id(info.mesh): info.mesh for info in infos.values()}.values():
        _give_groups(old, mesh)
    for info in infos.values():
        info.__post_init__()  # takes the groups out of the mesh, and this rank's place in them


class _Refusal:
    """Stands for how an FSDP group gathers or reduces."""

    def __init__(self, usual: Any) -> None:
        self.usual = usual

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TransportError("the process groups of this generation are aborted")

    allocate = __call__


def refuse_fsdp(model: nn.Module) -> None:
    """Until `clear_fsdp`, have FSDP2 raise TransportError where it would begin to gather or to reduce; from any thread. torch
    waits there for the end of an abort that is under way. Raises: HostUnfitError."""
    for _, group in _param_groups(model):
        for name in _GROUP_COMMUNICATES:
            if not isinstance(usual := getattr(group, name), _Refusal):
                setattr(group, name, _Refusal(usual))


def clear_fsdp(model: nn.Module) -> None:
    """Forget what a step that was cut short left in FSDP2: gathered parameters, their gradients, collectives under way, events,
    and the state of the pass. The device must be idle. Raises: HostUnfitError."""
    for state, group in _param_groups(model):
        for name in _GROUP_COMMUNICATES:
            if isinstance(refusal := getattr(group, name), _Refusal):
                setattr(group, name, refusal.usual)
        group._training_state = type(group._training_state).IDLE
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            param.grad_offload_event = None
            if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                unsharded.grad = None
            param.to_sharded()
        group._to_sharded()
        _clear(group, none=_GROUP_NONE, empty=_GROUP_EMPTY)
        if hasattr(group.comm_ctx, "all_gather_state"):  # only after the first forward pass
            _clear(group.comm_ctx, none=_CONTEXT_NONE, empty=_CONTEXT_EMPTY)
            getattr(group.comm_ctx, _CONTEXT_EMPTY_IF_ANY, {}).clear()
        _clear_state(state)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _clear_state(module._get_fsdp_state())


class GatherHooks(Protocol):
    """FSDP2's extension point for gathers, as it is documented in its module `_fsdp_param`."""

    def before_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[Any, Any]: ...

    def after_gather(self, gathered: Any, beside: Any, dtype: Any, *, out: Any = None) -> Any: ...


def gather_through(model: nn.Module, owners: Mapping[nn.Module, GatherHooks]) -> Iterator[tuple[Any, nn.Module]]:
    """Have FSDP2 gather the weights of `owners` by their hooks; yields FSDP's record of each weight, and its owner. The hooks
    are attributes of the shard, which stays a plain tensor. `model` is filled. Raises: HostUnfitError."""
    require(GATHERS)
    for _, group in _param_groups(model):
        for param in group.fsdp_params:
            info = param._module_info
            if info.module in owners and info.param_name == "weight":
                # The shard was allocated after FSDP had looked at it; this is what it does before the first pass.
                param.reset_sharded_param()
                shard, hooks = param.sharded_param._local_tensor, owners[info.module]
                shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = hooks.before_gather, hooks.after_gather
                param._init_extensions()
                yield param, info.module


def fsdp_changes(model: nn.Module) -> tuple[str, ...]:
    """One sentence for each attribute of FSDP's objects in `model` that this module needs and the installed torch lacks."""
    missing: list[str] = []

    def need(owner: object, names: Sequence[str]) -> None:
        for name in names:
            if not any(hasattr(owner, one) for one in name.split("|")):
                missing.append(f"{_FSDP}: {type(owner).__name__} has no {name}")

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        need(state, ("_fsdp_param_groups|_fsdp_param_group", "_training_state", "_state_ctx", "_modules_to_run_forward"))
        need(getattr(state, "_state_ctx", None), ("iter_forward_root", "post_backward_final_callback_queued"))
        for group in _groups_of(state):
            need(group, ("_training_state", "fsdp_params", "mesh_info", "post_forward_mesh_info", "comm_ctx"))
            need(group, (*_GROUP_NONE, *_GROUP_EMPTY, *_GROUP_COMMUNICATES))
            if hasattr(group.comm_ctx, "all_gather_stream"):
                need(group.comm_ctx, (*_CONTEXT_NONE, *_CONTEXT_EMPTY))
            for param in group.fsdp_params:
                need(param, ("unsharded_accumulated_grad", "grad_offload_event", "mesh_info", "post_forward_mesh_info"))
    return tuple(dict.fromkeys(missing))


def _give_groups(old: DeviceMesh, mesh: DeviceMesh) -> None:
    if old is not mesh:
        vars(old).clear()
        vars(old).update(vars(mesh))


def _param_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each parameter group of FSDP2 with its state. Raises: HostUnfitError."""
    require(FSDP)
    if changes := fsdp_changes(model):
        raise HostUnfitError(f"{'; '.join(changes)}. Install a torch that this version was tested with (README.md names them)")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in _groups_of(state):
                yield state, group


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before 2.13
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _clear_state(state: Any) -> None:
    state._training_state = type(state._training_state).IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _clear(owner: Any, *, none: Sequence[str], empty: Sequence[str]) -> None:
    for name in none:
        setattr(owner, name, None)
    for names in empty:
        name = next(one for one in names.split("|") if hasattr(owner, one))
        value = getattr(owner, name)
        if isinstance(value, (list, dict, set)):
            value.clear()
        else:
            setattr(owner, name, None)
