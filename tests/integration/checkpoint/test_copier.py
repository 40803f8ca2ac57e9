from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.copier import SMALL_BYTES, STAGING_BYTES, plan_moves
from elastictrain.checkpoint.tensor_bytes import cut
from tests.unit.examples import examples


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 7, 1000, SMALL_BYTES - 1, SMALL_BYTES, 3 * SMALL_BYTES])),
        max_size=60,
    )
)
def test_every_byte_is_moved_once_and_to_its_place(gaps: list[tuple[int, int]]) -> None:
    places, end = [], 0
    for gap, size_bytes in gaps:
        places.append((end + gap, size_bytes))
        end += gap + size_bytes
    moves = plan_moves(places)
    assert [index for move in moves for index in move.tensors] == [index for index, (_, size) in enumerate(places) if size]
    for move in moves:
        at = move.start
        for index in move.tensors:
            assert places[index][0] == at
            at += places[index][1]
        assert at == move.start + move.size_bytes
        if len(move.tensors) > 1:
            assert move.size_bytes <= STAGING_BYTES
            assert all(places[index][1] < SMALL_BYTES for index in move.tensors)


def test_many_small_neighbours_are_few_copies() -> None:
    places = [(100 * index, 100) for index in range(10_000)]
    assert len(plan_moves(places)) == 1
    large = [(index * SMALL_BYTES // 2, SMALL_BYTES // 2) for index in range(200)]
    assert len(plan_moves(large)) == 4


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_pieces_cross_no_segment(start: int, size_bytes: int, segment_bytes: int) -> None:
    if size_bytes // segment_bytes > 2000:
        segment_bytes = size_bytes
    pieces = cut(start, size_bytes, segment_bytes=segment_bytes)
    assert [begin for begin, _ in pieces][1:] == [end for _, end in pieces][:-1]
    assert sum(end - begin for begin, end in pieces) == size_bytes
    for begin, end in pieces:
        assert begin < end
        assert begin // segment_bytes == (end - 1) // segment_bytes
    assert (pieces[0][0], pieces[-1][1]) == (start, start + size_bytes)
