"""Finds impossible combinations of valid keys."""

import ipaddress
from collections.abc import Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from elastictrain.config.composed import CheckpointGroup, DataGroup, ParallelGroup, TrainGroup
from elastictrain.config.constraints import show, show_number
from elastictrain.errors import Problem

TORCHRUN_KILL_S = 30.0  # torchrun kills its workers this long after SIGTERM when it restarts, whatever its own option says

# The first key must be the smaller one, for the given reason. Most are timeouts: a wait must outlast what it waits for.
ORDERS = (
    ("train.micro_batch", "<=", "train.global_batch", ""),
    ("launch.poll_s", "<", "launch.lost_s", "a host must be heard before it is lost"),
    ("launch.backoff_s", "<=", "launch.backoff_limit_s", ""),
    ("fault.heartbeat_s", "<", "fault.step_timeout_s", "a rank must be heard several times before it counts as hung"),
    ("fault.heartbeat_s", "<", "fault.rendezvous_timeout_s", "a rank must be heard before the others stop waiting for it"),
    ("fault.heartbeat_s", "<", "fault.hang_floor_s", "a rank must be heard several times before its silence counts"),
    ("fault.step_timeout_s", "<=", "fault.init_timeout_s", "the first step also starts up, restores and compiles"),
    ("fault.step_timeout_s", "<", "fault.save_timeout_s", "a save writes all state to storage, a step does not"),
    ("fault.shutdown_grace_s", "<", "fault.notice_s", "an orderly end must be over before this host is taken away"),
    ("preflight.wait_s", "<", "preflight.limit_s", "waiting is a part of it"),
    ("preflight.limit_s", "<", "fault.init_timeout_s", "it names what hangs before"),
    ("preflight.thresholds.clock_warn_s", "<=", "preflight.thresholds.clock_fail_s", ""),
    ("preflight.thresholds.loss_warn", "<=", "preflight.thresholds.loss_fail", ""),
)

# keys of `parallel` that only some kinds read, with their defaults
SCOPES = (("shard_size", ("hsdp",), 0), ("reshard_after_forward", ("fsdp", "hsdp"), True), ("bucket_mb", ("ddp",), 25.0))


def check_rules(groups: Mapping[str, Any], *, uses_token_files: bool) -> list[Problem]:
    """All impossible combinations. A missing group may be invalid, so no rule about it applies."""
    problems = []
    if "launch" in groups:
        launch = groups["launch"]
        try:
            ipaddress.ip_address(launch.address or "::")
        except ValueError:
            message = f"must be an IP address, since each host would look up a name for itself, but is {show(launch.address)}"
            problems.append(Problem("launch.address", message))
        if "://" in launch.log_dir:
            message = f"must be a folder on the host and no URL, but is {show(launch.log_dir)}"
            problems.append(Problem("launch.log_dir", message))
        if 0 < launch.max_hosts < launch.min_hosts:
            message = f"must be >= `launch.min_hosts` = {launch.min_hosts}, or 0 for no limit, but is {launch.max_hosts}"
            problems.append(Problem("launch.max_hosts", message))
    if "data" in groups:
        problems += _check_data(groups["data"])
    if "parallel" in groups:
        problems += _check_parallel(groups["parallel"])
    if "fault" in groups and (grace_s := groups["fault"].shutdown_grace_s) >= TORCHRUN_KILL_S:
        message = f"must be < {TORCHRUN_KILL_S:g}, but is {grace_s:g}: torchrun kills its workers after that"
        problems.append(Problem("fault.shutdown_grace_s", message))
    if uses_token_files and groups.keys() >= {"train", "data"}:
        train = groups["train"]
        if train.eval_every_steps and not groups["data"].holdout_samples:
            message = (
                f"must be 0 when no samples are held out, but is {train.eval_every_steps}; "
                f"set `data.holdout_samples`, e.g. to {train.eval_samples}"
            )
            problems.append(Problem("train.eval_every_steps", message))
    problems += _check_train(groups.get("train"), groups.get("checkpoint"))
    problems += _check_interval(groups.get("checkpoint"))
    everything = SimpleNamespace(**groups)
    for lower, relation, upper, reason in ORDERS:
        concerned = {key.partition(".")[0] for key in (lower, upper)}
        if not concerned <= groups.keys() or ("preflight" in concerned and groups["preflight"].level == "off"):
            continue
        low, high = attrgetter(lower, upper)(everything)
        if low > high or (low == high and relation == "<"):
            message = f"must be {relation} `{upper}` = {show_number(high)}, but is {show_number(low)}"
            problems.append(Problem(lower, f"{message}: {reason}" if reason else message))
    return problems


def _check_data(data: DataGroup) -> list[Problem]:
    problems = []
    if data.sources is not None and data.path != "stdlib":
        message = f"must be left out where `data.sources` is given, but is {show(data.path)}"
        problems.append(Problem("data.path", message))
    if data.sources == ():
        problems.append(Problem("data.sources", "must have at least one source, or be null, but is []"))
    return problems


def _check_interval(checkpoint: CheckpointGroup | None) -> list[Problem]:
    if checkpoint is None or checkpoint.every_steps == "auto":
        return []
    if checkpoint.max_lost_s != CheckpointGroup().max_lost_s:
        message = f"is {checkpoint.max_lost_s:g}, but has an effect with `checkpoint.every_steps=auto` only: leave it out"
        return [Problem("checkpoint.max_lost_s", message)]
    return []


def _check_train(train: TrainGroup | None, checkpoint: CheckpointGroup | None) -> list[Problem]:
    problems: list[Problem] = []
    if train is not None and train.precision != "fp8" and train.fp8_scaling != "tensorwise":
        message = f"is {train.fp8_scaling}, but has an effect with `train.precision=fp8` only: leave it out"
        problems.append(Problem("train.fp8_scaling", message))
    if train is None or checkpoint is None:
        return problems
    if train.stop_after_evals_without_gain and not train.eval_every_steps:
        problems.append(Problem("train.stop_after_evals_without_gain", "needs evaluations: set `train.eval_every_steps`"))
    every_steps = 0 if checkpoint.every_steps == "auto" else checkpoint.every_steps
    if checkpoint.keep_best and (not train.eval_every_steps or not every_steps or train.eval_every_steps % every_steps):
        message = (
            "needs a checkpoint at each evaluation: `train.eval_every_steps` must be a multiple of `checkpoint.every_steps`"
        )
        figures = f"{train.eval_every_steps} and {checkpoint.every_steps}"
        problems.append(Problem("checkpoint.keep_best", f"{message}, but they are {figures}"))
    return problems


def _check_parallel(parallel: ParallelGroup) -> list[Problem]:
    problems = []
    # A setting that the chosen kind would ignore is refused rather than dropped silently.
    for name, kinds, default in SCOPES:
        value = getattr(parallel, name)
        if parallel.kind not in kinds and value != default:
            message = f"has no effect with parallel={parallel.kind}: leave it out, or choose {' or '.join(kinds)}"
            problems.append(Problem(f"parallel.{name}", f"is {show(value)}, but {message}"))
    if (parallel.backend, parallel.device) == ("nccl", "cpu"):
        problems.append(Problem("parallel.device", "must be auto or cuda with `parallel.backend` = nccl, but is cpu"))
    return problems
