import pytest
import torch
from torch import Tensor

from elastictrain.preflight.group.collectives import (
    ROW,
    Collective,
    ExpectedResult,
    Trial,
    answer,
    find_wrong,
    give,
    root,
    table,
)

DTYPES = (torch.float32, torch.bfloat16)


def simulate(trial: Trial, rows: Tensor) -> list[Tensor]:
    """What a backend without a fault gives to each rank: sums in the message's dtype, one rank after the other."""
    world_size, part = len(rows), trial.part
    given = [give(trial, rows, rank=rank) for rank in range(world_size)]
    match trial.collective:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER:
            total = given[0].clone()
            for one in given[1:]:
                total += one
            if trial.collective is Collective.ALL_REDUCE:
                return [total] * world_size
            return [total[rank * part : (rank + 1) * part] for rank in range(world_size)]
        case Collective.ALL_GATHER:
            return [torch.cat(given)] * world_size
        case Collective.BROADCAST:
            return [given[root(trial, world_size=world_size)]] * world_size
        case Collective.ALL_TO_ALL:
            return [torch.cat([one[rank * part : (rank + 1) * part] for one in given]) for rank in range(world_size)]
        case Collective.SEND_RECV:
            return [given[rank - 1] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
@pytest.mark.parametrize("collective", list(Collective))
def test_a_backend_without_a_fault_is_right(collective: Collective, world_size: int) -> None:
    for dtype in DTYPES:
        rows = table(dtype, world_size=world_size)
        for part in (1, 7, ROW + 5):
            trial = Trial(collective, part)
            results = simulate(trial, rows)
            for rank in {0, 1 % world_size, world_size - 1}:
                assert find_wrong(results[rank], answer(trial, rows, rank=rank)) is None


@pytest.mark.parametrize("collective", list(Collective))
def test_one_wrong_element_is_found(collective: Collective) -> None:
    rows = table(torch.float32, world_size=4)
    trial = Trial(collective, 50)
    received = simulate(trial, rows)[2].clone()
    right = answer(trial, rows, rank=2)
    place = 30 if collective is Collective.REDUCE_SCATTER else 130
    for bad in (float("nan"), float(received[place]) + 0.5, float("inf")):
        broken = received.clone()
        broken[place] = bad
        assert find_wrong(broken, right) == (1, place)


def test_parts_in_the_wrong_place_are_found() -> None:
    rows = table(torch.bfloat16, world_size=3)
    for collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.SEND_RECV, Collective.BROADCAST):
        trial = Trial(collective, ROW)
        received = simulate(trial, rows)[0].roll(ROW // 2)
        assert find_wrong(received, answer(trial, rows, rank=0)) is not None


def test_a_rank_that_is_left_out_of_a_sum_is_found() -> None:
    for dtype in DTYPES:
        rows = table(dtype, world_size=64)
        trial = Trial(Collective.ALL_REDUCE, 20)
        without = rows.clone()
        without[17] = 0
        received = simulate(trial, without)[0]
        assert find_wrong(received, answer(trial, rows, rank=0)) is not None


def test_the_source_of_what_is_wrong() -> None:
    rows = table(torch.float32, world_size=3)
    expected = {
        Collective.ALL_GATHER: 2,
        Collective.ALL_TO_ALL: 2,
        Collective.BROADCAST: 2,
        Collective.SEND_RECV: 0,
        Collective.ALL_REDUCE: None,
    }
    for collective, source in expected.items():
        trial = Trial(collective, 11)
        received = simulate(trial, rows)[1].clone()
        received[25] += 1
        right = answer(trial, rows, rank=1)
        assert find_wrong(received, right) == (1, 25)
        assert right.source(25) == source


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_partial_sums_are_exact_in_groups_of_any_size(dtype: torch.dtype) -> None:
    for world_size in (2, 36, 37, 256, 257, 1024, 5000):
        rows = table(dtype, world_size=world_size)
        assert rows.double().abs().sum(0).max() <= 2 / torch.finfo(dtype).eps
        assert rows.double().sum(0).unique().numel() > 10
        assert rows.abs().sum(1).min() > 0, "each rank contributes"


def test_values_do_not_follow_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = table(torch.float32, world_size=2)
    torch.manual_seed(2)
    assert torch.equal(first, table(torch.float32, world_size=2))
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_smallest_difference_is_found() -> None:
    one = torch.ones(1)
    assert find_wrong(one + 2e-7, ExpectedResult(one)) == (1, 0)
