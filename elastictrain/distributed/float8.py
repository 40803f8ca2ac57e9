"""Matrix products in 8 bits, by torchao: the layers that have them, and weights that FSDP2 gathers in 8 bits.

A layer scales its input, its weight and the gradient of its output by their largest values each time, so there is no state:
parameters and checkpoints are those of any other precision.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastictrain.config.composed import TrainGroup
from elastictrain.errors import ConfigError, Problem
from elastictrain.torch_private import largest_values
from elastictrain.torch_private_groups import gather_through

_KEY = "train.precision"
_CAPABILITY = (8, 9)
_MULTIPLE = 16  # of which both sizes of a weight must be multiples. Source: torch._scaled_mm
_SMALLEST = 1e-12  # largest value that a scale is made for. Source: torchao's EPS


def check_float8(device: torch.device) -> None:
    """Raises: ConfigError if products in 8 bits are not possible on `device`, or torchao is missing."""
    _import_torchao()
    if device.type == "cpu" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        found = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        message = f"must be bf16 or fp32 here: fp8 needs GPUs of compute capability 8.9 or newer, but this rank has {found}"
        raise ConfigError([Problem(_KEY, message)])


def suits(layer: nn.Module) -> bool:
    """Whether a module is a linear layer that can multiply in 8 bits."""
    return type(layer) is nn.Linear and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)


def multiply_in_8_bits(model: nn.Module, layers: Sequence[nn.Module], *, train: TrainGroup) -> None:
    """Replace `layers`; their parameters and the names of these stay. Raises: ConfigError."""
    torchao, chosen = _import_torchao(), {*layers}
    config = torchao.Float8LinearConfig.from_recipe_name(train.fp8_scaling)
    # The products for gradients of weights sum over tokens, whose number is a multiple of `seq_len`; padding is a copy.
    config = replace(config, pad_inner_dim=train.seq_len % _MULTIPLE != 0)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, _: module in chosen)


@dataclass(slots=True, eq=False)
class GatheredWeight:
    """A weight whose shard on this rank is cast when it is first gathered after `scale` was set, and sent in 8 bits."""

    layer: Any  # torchao's Float8Linear
    sharded: Any = None  # FSDP2's record of the parameter
    scale: Tensor = field(default_factory=lambda: torch.ones(()))
    cast: Tensor | None = None

    def before_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What FSDP2 gathers, and what `after_gather` needs besides; on the stream that copies it."""
        if self.cast is None:
            shard = self.sharded._sharded_param_data
            cast = torch.empty_like(shard, dtype=self.layer.config.cast_config_weight.target_dtype)
            torch.mul(shard, self.scale, out=cast)
            self.cast = cast.view(self.sharded.padded_sharded_param_size)
        return (self.cast,), (self.scale,)

    def after_gather(
        self, gathered: tuple[Tensor], beside: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole weight, and the memory that FSDP2 frees with it. `out`: that of an earlier gather, in the same memory."""
        if out is not None:
            out._scale = beside[0]
            return None
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        options, role = self.layer.linear_mm_config, GemmInputRole.WEIGHT
        return Float8TrainingTensor(gathered[0], beside[0], dtype, options, gemm_input_role=role), gathered


@dataclass(frozen=True, slots=True)
class GatheredWeights:
    """All of a model that FSDP2 gathers in 8 bits. torchao's own tensors for that are cast anew for each gather; and they would
    be part of the state of optimizers and checkpoints."""

    weights: tuple[GatheredWeight, ...] = field(default=())

    @classmethod
    def of(cls, model: nn.Module, *, train: TrainGroup) -> Self:
        """Empty if products are not in 8 bits, or each row has a scale: then both of its sides are needed in full."""
        if train.precision != "fp8" or train.fp8_scaling != "tensorwise":
            return cls()
        from torchao.float8.float8_linear import Float8Linear

        owners = {one: GatheredWeight(one) for one in model.modules() if isinstance(one, Float8Linear)}
        for sharded, module in gather_through(model, owners):
            owners[module].sharded = sharded
        return cls(tuple(one for one in owners.values() if one.sharded is not None))

    @torch.no_grad()
    def renew(self) -> None:
        """Take new scales from the weights as they are now; call it wherever they may have changed before a forward pass.
        Collective: yes."""
        if not self.weights:
            return
        # Without the padding behind a shard, which may be of any value; an empty one has no largest.
        shards = [one.sharded.sharded_param.to_local() for one in self.weights]
        shards = [one if one.numel() else one.new_zeros(1) for one in shards]
        largest = largest_values(shards)
        info = self.weights[0].sharded.mesh_info
        if info.shard_mesh_size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=info.shard_process_group)
        most = torch.finfo(self.weights[0].layer.config.cast_config_weight.target_dtype).max
        # In float64 as torchao does, so that each scale is the one that it would compute from a whole weight.
        scales = (most / largest.clamp(min=_SMALLEST).double()).float()
        for one, scale in zip(self.weights, scales.unbind(), strict=True):
            one.scale, one.cast = scale, None

    def forget(self) -> None:
        """Give back the memory of what is cast."""
        for one in self.weights:
            one.cast = None


def _import_torchao() -> Any:
    # Kernels of its own that were built for another torch are not used here.
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import torchao.float8
    except ImportError as error:
        message = f"must be bf16 or fp32 without the package torchao (pip install 'elastictrain[fp8]'): {error}"
        raise ConfigError([Problem(_KEY, message)]) from error
    finally:
        logger.setLevel(level)
    return torchao.float8
