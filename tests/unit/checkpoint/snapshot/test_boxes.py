import pytest
import torch

from elastictrain.checkpoint.snapshot.boxes import box_of, local_part, own_items


def test_plain_tensors_are_written_by_one_rank_each() -> None:
    tensors = {f"t{index}": torch.zeros(10 * (index + 1)) for index in range(7)} | {"empty": torch.zeros(0, 3)}
    written = [item.name for rank in range(3) for item in own_items(tensors, rank=rank, world_size=3)]
    assert sorted(written) == sorted(tensors)
    assert {item.name for item in own_items(tensors, rank=0, world_size=1)} == set(tensors)


def test_a_plain_tensor_is_its_own_box() -> None:
    box = box_of("w", torch.zeros(2, 3, dtype=torch.bfloat16), rank=1, world_size=4)
    assert (box.item.shape, box.item.offsets, box.item.sizes, box.item.dtype) == ((2, 3), (0, 0), (2, 3), "bfloat16")
    assert (box.replicas, box.replica) == (4, 1)


def test_the_part_is_the_memory_itself() -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    part = local_part(tensor)
    assert part.data_ptr() == tensor.data_ptr()
    assert not part.requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_tensor_without_elements_is_kept_once(world_size: int) -> None:
    items = [own_items({"e": torch.zeros(0)}, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(map(len, items)) == 1
