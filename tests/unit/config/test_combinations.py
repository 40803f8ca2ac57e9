"""Impossible combinations of good keys."""

from dataclasses import replace

import pytest

from elastictrain.config.combinations import check_combinations
from elastictrain.config.data import DataGroup
from elastictrain.config.optim import OptimGroup
from elastictrain.config.parallel import ParallelGroup
from elastictrain.config.train import TrainGroup

TRAIN = TrainGroup(steps=10, global_batch=8, micro_batch=4)


OPTIM = OptimGroup()
DATA = DataGroup()
DDP = ParallelGroup("ddp")


def keys(
    train: TrainGroup | None = TRAIN,
    optim: OptimGroup | None = OPTIM,
    data: DataGroup | None = DATA,
    parallel: ParallelGroup | None = DDP,
    uses_token_files: bool = True,
) -> list[str]:
    found = check_combinations(train=train, optim=optim, data=data, parallel=parallel, uses_token_files=uses_token_files)
    return [problem.key for problem in found]


def test_good_combination() -> None:
    assert keys() == []
    assert keys(replace(TRAIN, micro_batch=8), OptimGroup(warmup_steps=10)) == []


def test_a_micro_batch_is_part_of_the_global_batch() -> None:
    assert keys(replace(TRAIN, micro_batch=9)) == ["train.micro_batch"]


def test_warm_up_ends_within_the_run() -> None:
    assert keys(optim=OptimGroup(warmup_steps=11)) == ["optim.warmup_steps"]


def test_evaluation_needs_held_out_samples_of_token_files() -> None:
    train = replace(TRAIN, eval_every_steps=5)
    assert keys(train) == ["train.eval_every_steps"]
    assert keys(train, data=DataGroup(holdout_samples=1)) == []
    assert keys(train, uses_token_files=False) == []


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelGroup("hsdp", shard_size=4, reshard_after_forward=False), []),
        (ParallelGroup("fsdp", shard_size=4), ["parallel.shard_size"]),
        (ParallelGroup("ddp", reshard_after_forward=False), ["parallel.reshard_after_forward"]),
        (ParallelGroup("ddp", bucket_mb=50.0), []),
        (ParallelGroup("hsdp", bucket_mb=50.0), ["parallel.bucket_mb"]),
    ],
)
def test_a_setting_that_the_kind_ignores_is_refused(parallel: ParallelGroup, expected: list[str]) -> None:
    assert keys(parallel=parallel) == expected


def test_no_rule_about_a_group_that_is_itself_wrong() -> None:
    assert keys(None, OptimGroup(warmup_steps=10**9), None, None) == []
