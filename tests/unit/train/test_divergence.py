import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.train.replica_comparison import describe_divergence, find_divergence


@pytest.mark.parametrize(
    ("digests", "shards", "found"),
    [
        ([5], 1, ([], [])),
        ([5, 5], 1, ([], [])),
        ([5, 6], 1, ([], [0, 1])),
        ([5, 6, 5], 1, ([1], [])),
        ([6, 5, 5], 1, ([0], [])),
        ([5, 6, 7], 1, ([], [0, 1, 2])),
        ([5, 5, 6, 6], 1, ([], [0, 1, 2, 3])),
        ([5, 6, 7, 5, 5], 1, ([1, 2], [])),
        # Two copies of the model, each on two ranks: shards differ from each other, replicas must not.
        ([5, 6, 5, 6], 2, ([], [])),
        ([5, 6, 5, 7], 2, ([], [1, 3])),
        ([5, 6, 5, 6, 5, 7], 2, ([5], [])),
        ([4, 6, 5, 6, 5, 7], 2, ([0, 5], [])),
        # One copy only: nothing to compare with.
        ([5, 6, 7], 3, ([], [])),
    ],
)
def test_who_differs(digests: list[int], shards: int, found: tuple[list[int], list[int]]) -> None:
    assert find_divergence(digests, shards=shards) == found


@given(shards=st.integers(1, 4), replicas=st.integers(3, 6), data=st.data())
def test_one_wrong_rank_is_always_found(shards: int, replicas: int, data: st.DataObject) -> None:
    digests = [rank % shards for rank in range(shards * replicas)]
    wrong = data.draw(st.integers(0, len(digests) - 1))
    digests[wrong] ^= 1 << data.draw(st.integers(0, 62))
    assert find_divergence(digests, shards=shards) == ([wrong], [])


def test_the_sentence_names_ranks_and_the_host_to_replace() -> None:
    hosts = ["a", "a", "b", "b"]
    text = describe_divergence([2], [], step=40, hosts=hosts)
    assert [part in text for part in ("rank 2 on b", "replace b.")] == [True] * 2
    text = describe_divergence([], [1, 3], step=40, hosts=hosts)
    assert [part in text for part in ("rank 1 on a, rank 3 on b", "devices of a and b,")] == [True] * 2
