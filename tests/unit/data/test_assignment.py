from hypothesis import given
from hypothesis import strategies as st

from elastictrain.data.assignment import Portion, Share, passes

BATCHES = st.integers(1, 200)
MICRO = st.integers(1, 40)
WORLDS = st.integers(1, 40)
STEPS = st.integers(0, 10**9)


def everyone(step: int, *, batch: int, micro: int, world: int) -> list[tuple[Portion, ...]]:
    return [Share(batch, micro, world, rank).portions(step) for rank in range(world)]


@given(step=STEPS, batch=BATCHES, micro=MICRO, world=WORLDS)
def test_counting_portions_cover_the_step_exactly_once(step: int, batch: int, micro: int, world: int) -> None:
    shares = everyone(step, batch=batch, micro=micro, world=world)
    consumed = [position for share in shares for part in share if part.counts for position in range(part.first, part.end)]
    assert sorted(consumed) == list(range(step * batch, (step + 1) * batch))


@given(step=STEPS, batch=BATCHES, micro=MICRO, world=WORLDS)
def test_every_rank_makes_the_same_number_of_passes(step: int, batch: int, micro: int, world: int) -> None:
    wanted = Share(batch, micro, world, 0).passes_per_step
    assert {len(share) for share in everyone(step, batch=batch, micro=micro, world=world)} == {wanted}


@given(step=STEPS, batch=BATCHES, micro=MICRO, world=WORLDS)
def test_portions_fit_the_micro_batch_and_idle_ones_repeat_real_ones(step: int, batch: int, micro: int, world: int) -> None:
    portions = [part for share in everyone(step, batch=batch, micro=micro, world=world) for part in share]
    real = {(part.first, part.end) for part in portions if part.counts}
    assert all(0 < part.end - part.first <= micro for part in portions)
    assert all((part.first, part.end) in real for part in portions)


@given(step=STEPS, micro=MICRO, world=WORLDS, batch=BATCHES)
def test_a_rank_is_idle_in_its_last_pass_at_most(step: int, micro: int, world: int, batch: int) -> None:
    for share in everyone(step, batch=batch, micro=micro, world=world):
        assert all(part.counts for part in share[:-1])


@given(step=STEPS, micro=st.integers(1, 8), worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)), extra=st.integers(0, 50))
def test_micro_batches_do_not_depend_on_the_world_size(step: int, micro: int, worlds: tuple[int, int], extra: int) -> None:
    batch = micro * max(worlds) + extra
    contents = [
        {(part.first, part.end) for share in everyone(step, batch=batch, micro=micro, world=world) for part in share}
        for world in worlds
    ]
    assert contents[0] == contents[1]


@given(batch=BATCHES, world=WORLDS)
def test_one_pass_suffices_if_a_rank_can_hold_its_share(batch: int, world: int) -> None:
    assert Share(batch, -(-batch // world), world, 0).passes_per_step == 1


def test_uneven_world() -> None:
    # 10 samples in chunks of 4, 4 and 2 on two ranks: the second rank is short in the last pass and repeats its first chunk.
    assert everyone(3, batch=10, micro=4, world=2) == [
        (Portion(30, 34, True), Portion(38, 40, True)),
        (Portion(34, 38, True), Portion(34, 38, False)),
    ]


def test_more_ranks_than_samples() -> None:
    assert everyone(0, batch=2, micro=4, world=3) == [
        (Portion(0, 1, True),),
        (Portion(1, 2, True),),
        (Portion(0, 1, False),),
    ]


def test_passes_from_a_later_step_are_what_remains() -> None:
    share = Share(global_batch=7, micro_batch=2, world_size=2, rank=1)
    whole = list(passes(0, last_step=9, share=share, num_samples=20, seed=5, shuffle=True))
    rest = list(passes(4, last_step=9, share=share, num_samples=20, seed=5, shuffle=True))
    assert rest == [planned for planned in whole if planned.step >= 4]
    assert [planned.step for planned in rest] == [step for step in range(4, 9) for _ in range(2)]
