import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.tensor_bytes import COUNTER_BYTES, Box, box_of, choose_own, local_part, own_items
from tests.unit.examples import examples


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


def held(name: str, size: int, replicas: int, replica: int) -> Box:
    return Box(Item(name, "uint8", (size,), (0,), (size,)), replicas, replica)


SIZES = st.lists(st.integers(COUNTER_BYTES + 1, 9000), min_size=1, max_size=40)


@settings(max_examples=examples(200))
@given(SIZES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_exactly_one_replica_writes_each_piece_and_loads_are_even(sizes: list[int], replicas: int, chance: object) -> None:
    pieces = [(f"t{index}", size) for index, size in enumerate(sizes)]
    writers: dict[str, int] = {}
    loads = [0] * replicas
    for replica in range(replicas):
        # Ranks may list them in any order.
        shuffled = list(pieces)
        chance.shuffle(shuffled)  # type: ignore[attr-defined]
        for item in choose_own([held(name, size, replicas, replica) for name, size in shuffled]):
            assert item.name not in writers
            writers[item.name] = replica
            loads[replica] += max(1, item.size_bytes)
    assert writers.keys() == {name for name, _ in pieces}
    # No list can be shared out better than to within its largest piece.
    assert max(loads) - min(loads) <= max(1, *sizes)


def test_pieces_of_one_holder_are_its_own() -> None:
    assert [item.name for item in choose_own([held("a", 5, 1, 0), held("b", 0, 1, 0)])] == ["a", "b"]


def test_groups_are_shared_out_apart_from_each_other() -> None:
    """HSDP: shards are held twice, scalars by all four."""
    writers: dict[str, list[int]] = {}
    for rank in range(4):
        shard, replica = rank % 2, rank // 2
        boxes = [held(f"w{shard}", 10_000, 2, replica), held(f"v{shard}", 9_000, 2, replica), held("step", 8, 4, rank)]
        for item in choose_own(boxes):
            writers.setdefault(item.name, []).append(rank)
    assert {name: len(ranks) for name, ranks in writers.items()} == dict.fromkeys(["w0", "w1", "v0", "v1", "step"], 1)
    assert {rank for name, ranks in writers.items() if name != "step" for rank in ranks} == {0, 1, 2, 3}
    assert writers["step"] == [0]


def test_the_first_replica_writes_the_smallest_pieces_and_less_of_the_others() -> None:
    small = {f"s{number}": COUNTER_BYTES - number for number in range(50)}
    pieces = small | {f"t{number}": 10_000 for number in range(20)}
    items = [choose_own([held(name, size, 4, replica) for name, size in pieces.items()]) for replica in range(4)]
    assert small.keys() <= {item.name for item in items[0]}
    assert sum(map(len, items)) == len(pieces)
    loads = [sum(item.size_bytes for item in own) for own in items]
    assert max(loads) - min(loads) <= 10_000
