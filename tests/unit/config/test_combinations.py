"""Impossible combinations of good keys."""

from dataclasses import replace

import pytest

from elastictrain.config.combinations import check_combinations, check_launch
from elastictrain.config.data import DataGroup
from elastictrain.config.launch import LaunchGroup
from elastictrain.config.parallel import ParallelGroup
from elastictrain.config.train import TrainGroup

TRAIN = TrainGroup(steps=10, global_batch=8, micro_batch=4)


DATA = DataGroup()
DDP = ParallelGroup("ddp")


def keys(
    train: TrainGroup | None = TRAIN,
    data: DataGroup | None = DATA,
    parallel: ParallelGroup | None = DDP,
    uses_token_files: bool = True,
) -> list[str]:
    found = check_combinations(train=train, data=data, parallel=parallel, uses_token_files=uses_token_files)
    return [problem.key for problem in found]


def test_good_combination() -> None:
    assert keys() == []
    assert keys(replace(TRAIN, micro_batch=8)) == []


def test_a_micro_batch_is_part_of_the_global_batch() -> None:
    assert keys(replace(TRAIN, micro_batch=9)) == ["train.micro_batch"]


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
    assert keys(None, None, None) == []


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (LaunchGroup(), []),
        (LaunchGroup(min_hosts=3, max_hosts=3), []),
        (LaunchGroup(min_hosts=3), []),
        (LaunchGroup(min_hosts=3, max_hosts=2), ["launch.max_hosts"]),
        (LaunchGroup(poll_s=3.9), []),
        (LaunchGroup(poll_s=4.0), ["launch.poll_s"]),
        (LaunchGroup(poll_s=9.0, lost_s=8.0), ["launch.poll_s"]),
        (LaunchGroup(backoff_s=60.0), []),
        (LaunchGroup(backoff_s=61.0), ["launch.backoff_s"]),
        (LaunchGroup(backoff_s=1.0, backoff_limit_s=0.0), ["launch.backoff_s"]),
        (LaunchGroup(backoff_s=0.0, backoff_limit_s=0.0), []),
        (LaunchGroup(address="10.0.0.1"), []),
        (LaunchGroup(address="fd00::1"), []),
        (LaunchGroup(address="gpu-3.example.org"), ["launch.address"]),
        (LaunchGroup(address="10.0.0"), ["launch.address"]),
        (
            LaunchGroup(min_hosts=2, max_hosts=1, poll_s=5.0, backoff_s=70.0, address="x"),
            ["launch.address", "launch.max_hosts", "launch.poll_s", "launch.backoff_s"],
        ),
    ],
    ids=str,
)
def test_what_a_launcher_waits_for_can_come(launch: LaunchGroup, expected: list[str]) -> None:
    assert [problem.key for problem in check_launch(launch)] == expected


def test_what_is_wrong_with_a_launch_is_said_with_what_must_be_and_what_is() -> None:
    launch = LaunchGroup(min_hosts=2, max_hosts=1, poll_s=5.0, backoff_s=70.0, address="x")
    assert [str(problem) for problem in check_launch(launch)] == [
        '`launch.address` must be an IP address, since each host would look up a name for itself, but is "x"',
        "`launch.max_hosts` must be >= `launch.min_hosts` = 2, or 0 for no limit, but is 1",
        "`launch.poll_s` must be < `launch.lost_s` = 4, but is 5: a host must be heard before it is lost",
        "`launch.backoff_s` must be <= `launch.backoff_limit_s` = 60, but is 70",
    ]
