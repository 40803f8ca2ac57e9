import pytest

from elastictrain.preflight.host_layout import find_layout


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
    layout = find_layout(ranks, rank=rank, local_rank=local_rank, rendezvous="a")
    assert layout.hosts == ("a", "b", "c")
    assert (layout.node_rank, layout.host, layout.leads_host, layout.leads_group) == (node_rank, host, acts, leads)
    assert layout.local_world_size == ranks[rank][1]
    assert layout.hosts_of_ranks == ("a", "a", "b", "c", "c", "c")


def test_hosts_of_one_name_are_told_apart() -> None:
    layout = find_layout([("x", 1), ("y", 1), ("x", 1)], rank=2, local_rank=0, rendezvous="x")
    assert layout.hosts == ("x (node rank 0)", "y", "x (node rank 2)")
    assert layout.host == "x (node rank 2)"
