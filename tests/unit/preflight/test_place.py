import pytest

from elastictrain.preflight.place import find_place


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank", "host", "acts", "leads"),
    [
        (0, 0, 0, "a", True, True),
        (1, 1, 0, "a", False, False),
        (2, 0, 1, "b", True, False),
        (3, 0, 2, "c", True, False),
        (5, 2, 2, "c", False, False),
    ],
)
def test_hosts_may_have_different_numbers_of_ranks(
    rank: int, local_rank: int, node_rank: int, host: str, acts: bool, leads: bool
) -> None:
    ranks = [("a", 2), ("a", 2), ("b", 1), ("c", 3), ("c", 3), ("c", 3)]
    place = find_place(ranks, rank=rank, local_rank=local_rank, rendezvous="a")
    assert place.hosts == ("a", "b", "c")
    assert (place.node_rank, place.host, place.acts, place.leads) == (node_rank, host, acts, leads)
    assert place.local_world_size == ranks[rank][1]
    assert place.hosts_of_ranks == ("a", "a", "b", "c", "c", "c")


def test_hosts_of_one_name_are_told_apart() -> None:
    place = find_place([("x", 1), ("y", 1), ("x", 1)], rank=2, local_rank=0, rendezvous="x")
    assert place.hosts == ("x (node rank 0)", "y", "x (node rank 2)")
    assert place.host == "x (node rank 2)"
