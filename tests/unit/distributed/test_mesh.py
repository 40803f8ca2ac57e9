import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.distributed.mesh import MeshShape, mesh_shape


@pytest.mark.parametrize(
    ("kind", "world", "local", "shard", "shape"),
    [
        ("ddp", 4, 2, 0, MeshShape(4, 1)),
        ("fsdp", 4, 2, 0, MeshShape(1, 4)),
        ("hsdp", 16, 8, 0, MeshShape(2, 8)),
        ("hsdp", 8, 8, 0, MeshShape(1, 8)),
        ("hsdp", 8, 8, 4, MeshShape(2, 4)),
        ("hsdp", 12, 8, 0, MeshShape(1, 12)),
        ("hsdp", 2, 2, 4, MeshShape(1, 2)),
        ("ddp", 1, 1, 0, MeshShape(1, 1)),
    ],
)
def test_the_mesh_of_a_world(kind: str, world: int, local: int, shard: int, shape: MeshShape) -> None:
    assert mesh_shape(kind, world_size=world, local_world_size=local, shard_size=shard) == shape  # type: ignore[arg-type]


@given(
    kind=st.sampled_from(["ddp", "fsdp", "hsdp"]),
    world=st.integers(1, 64),
    local=st.integers(1, 8),
    shard=st.integers(0, 8),
)
def test_every_world_has_a_mesh_of_all_its_ranks(kind: str, world: int, local: int, shard: int) -> None:
    shape = mesh_shape(kind, world_size=world, local_world_size=local, shard_size=shard)  # type: ignore[arg-type]
    assert shape.replicas * shape.shards == world


@given(world=st.integers(2, 64))
def test_a_sharded_model_on_hosts_of_one_device_is_really_sharded(world: int) -> None:
    """A shard of one rank would be a copy: the sum of squares over ranks would count what exists once as `replicas` copies."""
    for shard in (0, 1):
        shape = mesh_shape("hsdp", world_size=world, local_world_size=1, shard_size=shard)
        assert shape == MeshShape(1, world)
