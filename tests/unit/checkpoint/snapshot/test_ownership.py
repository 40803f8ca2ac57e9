from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.snapshot.ownership import Copy, choose_own
from tests.unit.examples import examples

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


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
        own = choose_own([Copy(name, size, replicas, replica) for name, size in shuffled])
        for (name, size), mine in zip(shuffled, own, strict=True):
            if mine:
                assert name not in writers
                writers[name] = replica
                loads[replica] += max(1, size)
    assert writers.keys() == {name for name, _ in pieces}
    # No list can be shared out better than to within its largest piece.
    assert max(loads) - min(loads) <= max(1, *sizes)


def test_pieces_of_one_holder_are_its_own() -> None:
    assert choose_own([Copy("a", 5, 1, 0), Copy("b", 0, 1, 0)]) == [True, True]


def test_groups_are_shared_out_apart_from_each_other() -> None:
    """HSDP: shards are held twice, scalars by all four."""
    writers: dict[str, list[int]] = {}
    for rank in range(4):
        shard, replica = rank % 2, rank // 2
        copies = [Copy(f"w{shard}", 100, 2, replica), Copy(f"v{shard}", 90, 2, replica), Copy("step", 8, 4, rank)]
        for copy, own in zip(copies, choose_own(copies), strict=True):
            if own:
                writers.setdefault(copy.name, []).append(rank)
    assert {name: len(ranks) for name, ranks in writers.items()} == dict.fromkeys(["w0", "w1", "v0", "v1", "step"], 1)
    assert {rank for name, ranks in writers.items() if name != "step" for rank in ranks} == {0, 1, 2, 3}
