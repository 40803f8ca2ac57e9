"""What does it cost to compare replicas? The digest of parameters and optimizer state, and its exchange, against a step.

    torchrun --standalone --nproc-per-node 2 scripts/bench_compare.py recipe=llama_tiny train.micro_batch=8
    torchrun --standalone --nproc-per-node 8 scripts/bench_compare.py recipe=llama_ddp model=1b

Arguments are those of elastictrain.run; `parallel` must be ddp or hsdp where there are several ranks. A rank that is alone has
nobody to compare with: it does the same work in a group of one. After BENCH_STEPS (default 20) steps of the real loop,
BENCH_COMPARISONS (default 20) comparisons are timed, each from the call to its result on the host. Medians are printed, the
last line as JSON.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from elastictrain.config.composed import RunConfig
from elastictrain.config.load import load
from elastictrain.entry_point import leave_process
from elastictrain.errors import EXIT_OK, ElasticTrainError, UsageError
from elastictrain.events import Step
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.run import complain
from elastictrain.train.bringup import claim_memory, form_group, meet
from elastictrain.train.build import build
from elastictrain.train.checks import check_alone
from elastictrain.train.loop import Loop
from elastictrain.train.observing import Observer
from elastictrain.train.parameters import local
from elastictrain.train.replica_comparison import HostCopy, state_digest

STEPS = int(os.environ.get("BENCH_STEPS", "20"))
COMPARISONS = int(os.environ.get("BENCH_COMPARISONS", "20"))
WARM_UP = 3


class MeasuredError(Exception):
    """All steps are done. It ends the loop before the save at the end, which is not part of a step."""


class StepClock(Observer):
    """Stands where the observer stands, and times every step after those of the warm-up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, step: Step, *, step_s: float, skipped_total: int) -> None:
        if step.step > WARM_UP:
            self.seconds.append(step_s)
        if len(self.seconds) == STEPS:
            raise MeasuredError


def comparing(loop: Loop) -> Callable[[int], None]:
    """What compares once, and waits for the result."""
    tensors = loop.state.tensors()
    changing = loop.state.changed_by_forward()
    compared = [tensor for name, tensor in tensors.items() if name not in changing]

    def with_others(number: int) -> None:
        loop.comparison.begin(-number)
        loop.comparison.check(-number)

    def alone(number: int) -> None:
        digests = state_digest(compared).reshape(1)
        dist.all_reduce(digests)
        HostCopy(digests).wait()

    return with_others if loop.context.identity.world_size > 1 else alone


def time_comparisons(loop: Loop, *, synchronize: Callable[[], None]) -> list[float]:
    compare, seconds = comparing(loop), list[float]()
    for number in range(1, 1 + WARM_UP + COMPARISONS):
        synchronize()
        dist.barrier()
        began = time.perf_counter()
        compare(number)
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def state_bytes(loop: Loop) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in loop.state.tensors().values())


def main() -> int:
    # All ranks must name the same folder; the agent's id is what they share.
    folder = f"{tempfile.gettempdir()}/elastictrain-bench-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    fixed = (
        f"run.dir={folder}",
        f"train.steps={WARM_UP + STEPS + 2}",
        "train.eval_every_steps=0",
        "checkpoint.every_steps=0",
        "checkpoint.buffers=0",
        "telemetry.loggers=[]",
        "telemetry.progress=off",
        "optim.warmup_steps=5",
    )
    identity = None
    try:
        identity = read_identity(os.environ)
        measure(load([*sys.argv[1:], *fixed]), identity)
    except ElasticTrainError as error:
        return complain(error, identity)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_OK


def measure(config: RunConfig, identity: Identity) -> None:
    if identity.world_size > 1 and config.parallel.kind == "fsdp":
        raise UsageError("`parallel` must be ddp or hsdp, but is fsdp, which has no replicas to compare")
    torch.set_num_threads(config.run.num_threads)
    context = check_alone(config, identity, tracker=ProgressTracker(), stop_request=lambda: None)
    claim_memory(context)
    meet(context)
    form_group(context)
    loop = build(context, None)
    synchronize = torch.cuda.synchronize if context.group.device.type == "cuda" else (lambda: None)
    steps = StepClock()
    with suppress(MeasuredError):
        replace(loop, observer=steps).run()
    compare_s = time_comparisons(loop, synchronize=synchronize)
    if identity.rank == 0:
        report(config, loop, step_s=statistics.median(steps.seconds), compare_s=statistics.median(compare_s))
    loop.abandon()


def report(config: RunConfig, loop: Loop, *, step_s: float, compare_s: float) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {config.run.num_threads} thread(s) a rank"
    size_bytes = state_bytes(loop)
    print(f"{loop.context.identity.world_size} x {device}, torch {torch.__version__}: {' '.join(sys.argv[1:])}")
    print(f"step           {step_s * 1e3:9.2f} ms")
    print(
        f"comparison     {compare_s * 1e3:9.2f} ms  {size_bytes / 1e9:.2f} GB a rank, {size_bytes / compare_s / 1e9:.0f} GB/s"
    )
    for every in (1, 10, 100):
        print(f"one in {every:3} steps {compare_s / step_s / every:9.3%} of the time")
    figures = {"ranks": loop.context.identity.world_size, "step_ms": step_s * 1e3, "compare_ms": compare_s * 1e3}
    print(json.dumps(figures | {"state_bytes": size_bytes}))


if __name__ == "__main__":
    leave_process(main())
