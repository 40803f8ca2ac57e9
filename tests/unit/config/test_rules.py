"""Impossible combinations of good keys, and the ladder of timeouts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.config.composed import (
    CheckpointGroup,
    DataGroup,
    FaultGroup,
    LaunchGroup,
    ParallelGroup,
    SourceGroup,
    TrainGroup,
)
from elastictrain.config.preflight import PreflightGroup, PreflightThresholds
from elastictrain.config.rules import check_rules

TRAIN = TrainGroup(steps=10, global_batch=8, micro_batch=4)
OFF = PreflightGroup(level="off")


def keys(*, uses_token_files: bool = True, **groups: Any) -> list[str]:
    return [problem.key for problem in check_rules(groups, uses_token_files=uses_token_files)]


def test_good_combination() -> None:
    good = {"train": TRAIN, "data": DataGroup(), "parallel": ParallelGroup("ddp"), "launch": LaunchGroup()}
    assert keys(**good, fault=FaultGroup(), preflight=PreflightGroup()) == []
    assert keys(train=replace(TRAIN, micro_batch=8)) == []


def test_a_micro_batch_is_part_of_the_global_batch() -> None:
    assert keys(train=replace(TRAIN, micro_batch=9)) == ["train.micro_batch"]


def test_scales_are_those_of_products_in_8_bits() -> None:
    assert keys(train=replace(TRAIN, fp8_scaling="rowwise")) == ["train.fp8_scaling"]
    assert keys(train=replace(TRAIN, precision="fp8", fp8_scaling="rowwise")) == []


def test_evaluation_needs_held_out_samples_of_token_files() -> None:
    train = replace(TRAIN, eval_every_steps=5)
    assert keys(train=train, data=DataGroup()) == ["train.eval_every_steps"]
    assert keys(train=train, data=DataGroup(holdout_samples=1)) == []
    assert keys(train=train, data=DataGroup(), uses_token_files=False) == []


def test_sources_take_the_place_of_the_path() -> None:
    assert keys(data=DataGroup(sources=(SourceGroup("a"),))) == []
    assert keys(data=DataGroup(path="b", sources=(SourceGroup("a"),))) == ["data.path"]
    assert keys(data=DataGroup(sources=())) == ["data.sources"]


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelGroup("hsdp", shard_size=4, reshard_after_forward=False), []),
        (ParallelGroup("fsdp", shard_size=4), ["parallel.shard_size"]),
        (ParallelGroup("ddp", reshard_after_forward=False), ["parallel.reshard_after_forward"]),
        (ParallelGroup("ddp", bucket_mb=50.0), []),
        (ParallelGroup("hsdp", bucket_mb=50.0), ["parallel.bucket_mb"]),
        (ParallelGroup("ddp", backend="gloo", device="cuda"), []),
        (ParallelGroup("ddp", backend="nccl", device="cuda"), []),
        (ParallelGroup("ddp", backend="nccl", device="cpu"), ["parallel.device"]),
    ],
)
def test_a_setting_that_the_kind_ignores_is_refused(parallel: ParallelGroup, expected: list[str]) -> None:
    assert keys(parallel=parallel) == expected


def test_a_bound_on_an_interval_that_is_not_learned_is_refused() -> None:
    assert keys(checkpoint=CheckpointGroup(max_lost_s=60.0)) == ["checkpoint.max_lost_s"]
    assert keys(checkpoint=CheckpointGroup(every_steps="auto", max_lost_s=60.0)) == []
    train = replace(TRAIN, eval_every_steps=100)
    assert keys(train=train, checkpoint=CheckpointGroup(every_steps="auto", keep_best=1)) == ["checkpoint.keep_best"]


def test_no_rule_about_a_group_that_is_itself_wrong() -> None:
    assert keys() == []
    assert keys(preflight=PreflightGroup(limit_s=6000.0)) == []


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (LaunchGroup(), []),
        (LaunchGroup(min_hosts=3, max_hosts=3), []),
        (LaunchGroup(min_hosts=3), []),
        (LaunchGroup(min_hosts=3, max_hosts=2), ["launch.max_hosts"]),
        (LaunchGroup(log_dir="logs"), []),
        (LaunchGroup(log_dir="s3://bucket/logs"), ["launch.log_dir"]),
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
    ],
    ids=str,
)
def test_what_a_launcher_waits_for_can_come(launch: LaunchGroup, expected: list[str]) -> None:
    assert keys(launch=launch) == expected


SENTENCES = """\
`launch.address` must be an IP address, since each host would look up a name for itself, but is "x"
`launch.max_hosts` must be >= `launch.min_hosts` = 2, or 0 for no limit, but is 1
`train.micro_batch` must be <= `train.global_batch` = 10000000, but is 10000001
`launch.poll_s` must be < `launch.lost_s` = 4, but is 5: a host must be heard before it is lost
`launch.backoff_s` must be <= `launch.backoff_limit_s` = 60, but is 70"""


def test_what_is_wrong_is_said_with_what_must_be_and_what_is() -> None:
    launch = LaunchGroup(min_hosts=2, max_hosts=1, poll_s=5.0, backoff_s=70.0, address="x")
    train = TrainGroup(steps=10, global_batch=10_000_000, micro_batch=10_000_001)
    problems = check_rules({"launch": launch, "train": train}, uses_token_files=True)
    assert "\n".join(map(str, problems)) == SENTENCES


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"heartbeat_s": 120.0}, "fault.heartbeat_s"),
        ({"rendezvous_timeout_s": 1.0}, "fault.heartbeat_s"),
        ({"hang_floor_s": 1.0}, "fault.heartbeat_s"),
        ({"step_timeout_s": 601.0}, "fault.step_timeout_s"),
        ({"step_timeout_s": 600.0, "save_timeout_s": 600.0}, "fault.step_timeout_s"),
        ({"shutdown_grace_s": 30.0, "notice_s": 31.0}, "fault.shutdown_grace_s"),
        ({"shutdown_grace_s": 20.0, "notice_s": 20.0}, "fault.shutdown_grace_s"),
        ({"notice_s": 5.0}, "fault.shutdown_grace_s"),
    ],
)
def test_each_rung(changes: dict[str, float], key: str) -> None:
    assert keys(fault=replace(FaultGroup(hang_floor_s=500.0), **changes), preflight=PreflightGroup()) == [key]


def test_equal_step_and_init_timeouts_are_a_ladder() -> None:
    assert keys(fault=FaultGroup(init_timeout_s=60.0, step_timeout_s=60.0), preflight=OFF) == []


seconds = st.floats(0.1, 1000.0)


@given(seconds, seconds, seconds, seconds)
def test_good_only_when_every_wait_is_longer_than_what_it_waits_for(beat: float, step: float, init: float, save: float) -> None:
    fault = FaultGroup(
        heartbeat_s=beat,
        step_timeout_s=step,
        init_timeout_s=init,
        save_timeout_s=save,
        rendezvous_timeout_s=2000.0,
        hang_floor_s=2000.0,
    )
    assert (not keys(fault=fault, preflight=OFF)) == (beat < step <= init and step < save)


@pytest.mark.parametrize(
    ("preflight", "expected"),
    [
        (PreflightGroup(limit_s=599.0), []),
        (PreflightGroup(limit_s=600.0), ["preflight.limit_s"]),
        (PreflightGroup(limit_s=600.0, wait_s=700.0), ["preflight.wait_s", "preflight.limit_s"]),
        (PreflightGroup(limit_s=10.0, wait_s=10.0), ["preflight.wait_s"]),
        (PreflightGroup(limit_s=600.0, wait_s=700.0, level="off"), []),
        (PreflightGroup(thresholds=PreflightThresholds(clock_fail_s=0.5)), ["preflight.thresholds.clock_warn_s"]),
        (PreflightGroup(thresholds=PreflightThresholds(loss_warn=0.02)), ["preflight.thresholds.loss_warn"]),
    ],
)
def test_a_preflight_ends_before_what_waits_for_it(preflight: PreflightGroup, expected: list[str]) -> None:
    assert keys(fault=FaultGroup(), preflight=preflight) == expected


@pytest.mark.parametrize(
    ("eval_every", "save_every", "keep_best", "patience", "expected"),
    [
        (0, 10, 0, 0, []),
        (20, 10, 2, 3, []),
        (10, 10, 1, 0, []),
        (15, 10, 1, 0, ["checkpoint.keep_best"]),
        (5, 10, 1, 0, ["checkpoint.keep_best"]),
        (10, 0, 1, 0, ["checkpoint.keep_best"]),
        (0, 10, 1, 1, ["train.stop_after_evals_without_gain", "checkpoint.keep_best"]),
    ],
)
def test_what_follows_from_evaluations_needs_them(
    eval_every: int, save_every: int, keep_best: int, patience: int, expected: list[str]
) -> None:
    train = replace(TRAIN, eval_every_steps=eval_every, stop_after_evals_without_gain=patience)
    assert keys(train=train, checkpoint=CheckpointGroup(every_steps=save_every, keep_best=keep_best)) == expected
