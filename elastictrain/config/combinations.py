"""Decides which combinations of otherwise good keys are impossible. A group that is None is not known to be good: no rule
about it applies."""

import ipaddress

from elastictrain.config.data import DataGroup
from elastictrain.config.describe import show
from elastictrain.config.launch import LaunchGroup
from elastictrain.config.parallel import ParallelGroup
from elastictrain.config.train import TrainGroup
from elastictrain.errors import Problem


def check_batches(train: TrainGroup) -> list[Problem]:
    """A micro-batch is a part of the global batch."""
    if train.micro_batch <= train.global_batch:
        return []
    message = f"must be <= `train.global_batch` = {train.global_batch}, but is {train.micro_batch}"
    return [Problem("train.micro_batch", message)]


def check_evaluation(train: TrainGroup, *, data: DataGroup) -> list[Problem]:
    """Evaluation on token files needs samples that are not trained on. Does not apply to tasks with datasets of their own."""
    if train.eval_every_steps == 0 or data.holdout_samples > 0:
        return []
    message = (
        f"must be 0 when no samples are held out, but is {train.eval_every_steps}; "
        f"set `data.holdout_samples`, e.g. to {train.eval_samples}"
    )
    return [Problem("train.eval_every_steps", message)]


def check_parallel(parallel: ParallelGroup) -> list[Problem]:
    """A setting that the chosen kind would ignore is refused rather than dropped silently."""
    scopes = (("shard_size", ("hsdp",), 0), ("reshard_after_forward", ("fsdp", "hsdp"), True), ("bucket_mb", ("ddp",), 25.0))
    problems = []
    for name, kinds, default in scopes:
        value = getattr(parallel, name)
        if parallel.kind not in kinds and value != default:
            message = f"has no effect with parallel={parallel.kind}: leave it out, or choose {' or '.join(kinds)}"
            problems.append(Problem(f"parallel.{name}", f"is {show(value)}, but {message}"))
    return problems


def check_launch(launch: LaunchGroup) -> list[Problem]:
    """What is waited for can come, and the others can be told where this host is."""
    problems = []
    if launch.address and not _is_address(launch.address):
        message = f"must be an IP address, since each host would look up a name for itself, but is {show(launch.address)}"
        problems.append(Problem("launch.address", message))
    if 0 < launch.max_hosts < launch.min_hosts:
        message = f"must be >= `launch.min_hosts` = {launch.min_hosts}, or 0 for no limit, but is {launch.max_hosts}"
        problems.append(Problem("launch.max_hosts", message))
    if launch.poll_s >= launch.lost_s:
        message = (
            f"must be < `launch.lost_s` = {launch.lost_s:g}, but is {launch.poll_s:g}: a host must be heard before it is lost"
        )
        problems.append(Problem("launch.poll_s", message))
    if launch.backoff_s > launch.backoff_limit_s:
        message = f"must be <= `launch.backoff_limit_s` = {launch.backoff_limit_s:g}, but is {launch.backoff_s:g}"
        problems.append(Problem("launch.backoff_s", message))
    return problems


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def check_combinations(
    *,
    train: TrainGroup | None,
    data: DataGroup | None,
    parallel: ParallelGroup | None,
    uses_token_files: bool,
) -> list[Problem]:
    """Every impossible combination."""
    problems: list[Problem] = []
    if train:
        problems += check_batches(train)
    if train and data and uses_token_files:
        problems += check_evaluation(train, data=data)
    if parallel:
        problems += check_parallel(parallel)
    return problems
