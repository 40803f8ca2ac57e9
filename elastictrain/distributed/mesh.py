"""The device mesh: which ranks share one copy of the model, and which hold copies."""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, slots=True)
class MeshShape:
    """`replicas` copies of the model, each sharded over `shards` ranks; their product is the world size."""

    replicas: int
    shards: int


def mesh_shape(kind: Literal["ddp", "fsdp", "hsdp"], *, world_size: int, local_world_size: int, shard_size: int) -> MeshShape:
    """The mesh for whatever world there is. A world that the shard size does not divide is sharded whole."""
    if kind == "ddp":
        return MeshShape(world_size, 1)
    wanted = shard_size or local_world_size
    if kind == "fsdp" or wanted == 1 or world_size % wanted:
        return MeshShape(1, world_size)
    return MeshShape(world_size // wanted, wanted)


def make_mesh(shape: MeshShape, *, device_type: str) -> DeviceMesh:
    """The mesh over the default group; two-dimensional where there are several copies. Collective: yes."""
    if shape.replicas == 1:
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))
    return init_device_mesh(device_type, (shape.replicas, shape.shards), mesh_dim_names=("replica", "shard"))
