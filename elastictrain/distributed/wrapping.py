"""The mesh of ranks; checkpointing, compilation and DDP / FSDP2 / HSDP, none of which changes a parameter's name."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.distributed.float8 import GatheredWeights, multiply_in_8_bits
from elastictrain.distributed.lone_process_group import LoneProcessGroup
from elastictrain.distributed.running_statistics import RunningStatistics
from elastictrain.torch_private import launch_without_lock
from elastictrain.torch_private_groups import keep_mesh, move_ddp, rebuild_buckets

_MATRIX_PRODUCTS = frozenset((torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default))
_ATTENTION = frozenset(
    (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
_SCALES = frozenset((torch.ops.aten.max.default,))  # one number each, of which a cast to 8 bits makes its scale

_Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class MeshShape:
    """`replicas` copies of the model, each sharded over `shards` ranks; their product is the world size."""

    replicas: int
    shards: int

    @property
    def world_size(self) -> int:
        return self.replicas * self.shards


def mesh_shape(parallel: ParallelGroup, *, world_size: int, local_world_size: int) -> MeshShape:
    """The mesh for any world. A world that the shard size does not divide is sharded whole."""
    if parallel.kind == "ddp":
        return MeshShape(world_size, 1)
    wanted = parallel.shard_size or local_world_size
    if parallel.kind == "fsdp" or wanted == 1 or world_size % wanted:
        return MeshShape(1, world_size)
    return MeshShape(world_size // wanted, wanted)


@dataclass(slots=True)
class ParameterGathers:
    """Tells when FSDP begins and ends to wait for the parameters of a module, or to launch that on a device, in a forward
    pass. Its hooks stay for good: a block is compiled anew when its hooks change."""

    mark: Callable[[bool], None] | None = None  # True: it begins

    def follow(self, module: nn.Module, *, compiled: bool) -> None:
        """Call this once `module` is sharded."""
        for begins in (True, False):

            def tell(*_: object, begins: bool = begins) -> None:
                if self.mark is not None:
                    self.mark(begins)

            # FSDP's own hook is between the two, and is not compiled either.
            hook = torch.compiler.disable(tell) if compiled else tell  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(hook, prepend=begins)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model ready to train. Gradients after the backward pass are sums over ranks divided by the world size."""

    module: nn.Module  # runs the forward pass
    bare: nn.Module  # the model with its own parameter names
    shape: MeshShape
    precision_context: Callable[[], AbstractContextManager[object]]  # entered around each forward pass and loss
    groups: tuple[dist.ProcessGroup, ...] = ()  # the model's own groups, besides the default one
    gathers: ParameterGathers = field(default_factory=ParameterGathers)
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    float8: GatheredWeights = field(default_factory=GatheredWeights)


@dataclass(frozen=True, slots=True)
class Wrapping:
    shape: MeshShape
    parallel: ParallelGroup
    train: TrainGroup
    device: torch.device
    in_part: bool = False  # whether a backward pass may leave out parameters
    gathers: ParameterGathers = field(default_factory=ParameterGathers)

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module], *, float8: Sequence[nn.Module] = ()) -> nn.Module:
        """Prepare and shard a model whose parameters may still be on the meta device; DDP comes later, once they are filled.
        Order matters: checkpointing inside the compiled region, both inside the sharded unit. `float8`: layers that multiply in
        8 bits. Collective: yes."""
        parallel, train = self.parallel, self.train
        if float8:
            multiply_in_8_bits(model, float8, train=train)
        if train.compile and self.device.type == "cuda":
            launch_without_lock()
        for block in blocks:
            if train.activation_checkpointing != "none":
                _checkpoint(block, selective=train.activation_checkpointing == "selective")
            if train.compile:
                block.compile()
        if train.compile and not blocks:
            model.compile()
        if parallel.kind != "ddp":
            # reduce_dtype is always explicit: the meaning of None differs between torch versions.
            dtype = None if train.precision == "fp32" else torch.bfloat16
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            mesh = self.make_mesh()
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward)
            fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            for module in (*blocks, model):
                self.gathers.follow(module, compiled=train.compile)
        return model

    def make_mesh(self) -> DeviceMesh:
        """The ranks of the default group in this shape, with groups of their own. Collective: yes."""
        shape = self.shape
        sizes, names = ((shape.shards,), ("data",)) if shape.replicas == 1 else (astuple(shape), ("replica", "shard"))
        return keep_mesh(init_device_mesh(self.device.type, sizes, mesh_dim_names=names))

    def finish(self, model: nn.Module) -> Wrapped:
        """Make a filled model trainable: wrap it in DDP if configured, and set the forward precision. Collective: yes."""
        if self.parallel.kind != "ddp":
            meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
            groups = next((tuple(mesh.get_all_groups()) for mesh in meshes), ())
            float8 = GatheredWeights.of(model, train=self.train)
            return Wrapped(model, model, self.shape, nullcontext, groups, self.gathers, RunningStatistics.of(model), float8)
        module: nn.Module = model
        statistics = RunningStatistics.of(model)
        if self.shape.world_size > 1:
            # Constant buffers like positional tables are the same everywhere; only buffers that training changes need a sync.
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)} | statistics.names
            # torch 2.13 gave the option a new name, and warns of the old one.
            new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
            option = "forward_sync_buffers" if new_name else "broadcast_buffers"
            ddp = DistributedDataParallel(
                model,
                process_group=LoneProcessGroup(),
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                bucket_cap_mb=self.parallel.bucket_mb,
                gradient_as_bucket_view=True,
                init_sync=False,
                find_unused_parameters=self.in_part,
                **{option: any(name not in names for name in model.state_dict())},  # type: ignore[arg-type]
            )
            _settle_buckets(ddp)
            if dist.get_backend() != "fake":
                attach_ddp(ddp, fresh=True)
            module = ddp
        context: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.train.precision != "fp32":
            context = partial(torch.autocast, self.device.type, dtype=torch.bfloat16)
        return Wrapped(module, model, self.shape, context, statistics=statistics)


@contextmanager
def accumulation(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-batch's forward and backward: only the `last` of a step communicates gradients and frees parameters."""
    if isinstance(module, DistributedDataParallel):
        with nullcontext() if last else module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last)
    yield


def reshard_parameters(module: nn.Module) -> None:
    """After a forward pass without a backward pass: free gathered FSDP parameters, and restore the sharded ones."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _checkpoint(block: nn.Module, *, selective: bool) -> None:
    """Recompute the block's activations in the backward pass. The forward method is replaced in place: a wrapper module would
    change the names of parameters, and with them every checkpoint."""
    options = {"context_fn": _selective_contexts} if selective else {}
    if selective:
        # Without it torch does not keep the compiled block: it cannot know when the policy changes.
        source = f"{inspect.getsource(_selective_contexts)} {sorted(map(str, (*_MATRIX_PRODUCTS, *_ATTENTION, *_SCALES)))}"
        _selective_contexts.cache_hash = source  # type: ignore[attr-defined]
    forward = block.forward

    # A function and not a `partial`: torch.compile does not look into the latter, and would compile nothing at all.
    def checkpointed(*args: object, **kwargs: object) -> object:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)  # type: ignore[arg-type]

    block.forward = checkpointed


@torch.no_grad()
def share_copies(wrapped: Wrapped) -> None:
    """Where each rank has a whole copy, broadcast that of rank 0, as DDP does when it is made. Collective: yes."""
    if isinstance(wrapped.module, DistributedDataParallel):
        _share_tensors(wrapped.bare)


def attach_ddp(ddp: DistributedDataParallel, *, fresh: bool) -> None:
    """Have DDP reduce over the default group. It is `fresh` on a rank that has just made it: where it is fresh on all, they
    begin with the values of rank 0; otherwise the caller restores the state. Collective: yes."""
    assert dist.group.WORLD is not None  # noqa: S101
    move_ddp(ddp, dist.group.WORLD)
    # Not left to DDP's constructor, in which only fresh ranks would communicate.
    all_fresh = torch.tensor([float(fresh)], device=next(ddp.module.parameters()).device)
    dist.all_reduce(all_fresh, op=dist.ReduceOp.MIN)
    if all_fresh.item():
        _share_tensors(ddp.module)
    _settle_buckets(ddp)


@torch.no_grad()
def _share_tensors(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor, src=0)


def _settle_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP lay out its gradient buckets finally, before the first step. Collective: yes.

    DDP lays them out anew after its first backward pass, in the order in which gradients became ready. The place of a gradient
    in its bucket decides in which order three or more ranks are summed, so the first step after a restart would round
    differently than the same step of an undisturbed run. A rehearsal with zero gradients, last parameter first, takes the place
    of that first pass.
    """
    if ddp.find_unused_parameters:
        return  # such a DDP never lays them out anew
    parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for parameter in reversed(parameters):
        parameter.backward(torch.zeros_like(parameter))
    for parameter in parameters:
        parameter.grad = None
    # Not in the next forward pass: ranks that have run one and ranks that have not must rehearse with equal buckets.
    rebuild_buckets(ddp)


def _selective_contexts() -> _Contexts:
    """Keep attention, every other matrix product and scales; recompute the rest. Source: the per-operator policy of Korthikanti
    et al. 2022, used widely for Llama; a product costs far more time per byte of its result than an elementwise operation."""
    # Products are counted in the forward and in the recomputation, so each pass through a block needs a policy of its own.
    counts = {False: 0, True: 0}

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        recomputing = bool(getattr(context, "is_recompute", False))
        if op in _MATRIX_PRODUCTS:
            counts[recomputing] += 1
            return CheckpointPolicy.MUST_SAVE if counts[recomputing] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        name = getattr(op, "__name__", "").split(".")[0]
        return CheckpointPolicy.MUST_SAVE if name in _ATTENTION or op in _SCALES else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: _Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
