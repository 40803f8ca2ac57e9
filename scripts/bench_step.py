"""How fast is our step? The real loop against the shortest loop one could write by hand, interleaved in one process group.

    torchrun --standalone --nproc-per-node 2 scripts/bench_step.py recipe=llama_tiny train.micro_batch=8
    torchrun --standalone --nproc-per-node 2 scripts/bench_step.py recipe=llama_fsdp train.global_batch=8

Arguments are those of elastictrain.run. After every block of steps our loop is held up, inside its own observer, while the
hand-written loop runs as many steps of the same model on the same shapes; so a machine whose speed drifts is fair to both.
BENCH_BLOCKS (default 5) blocks of BENCH_STEPS (default 20) steps are counted after one of warm-up; medians are compared.
In fp8 the hand-written loop is the usual one of torchao: weights gathered in 8 bits, scales taken once after each update.
With BENCH_LOSS=logits it computes all logits of a Llama, and their cross-entropy in float32, in place of the task's loss.
BENCH_PROFILE=1 prints where the device spent its time. BENCH_ALONE=1 leaves the hand-written loop out, BENCH_ALONE=theirs ours,
where memory does not hold two models.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastictrain.config.composed import RunConfig
from elastictrain.config.load import load
from elastictrain.config.task_signature import build_task
from elastictrain.entry_point import leave_process
from elastictrain.errors import EXIT_OK, ElasticTrainError
from elastictrain.events import Step
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.run import complain
from elastictrain.train.bringup import claim_memory, form_group, meet
from elastictrain.train.build import build
from elastictrain.train.checks import check_alone
from elastictrain.train.context import TrainContext
from elastictrain.train.observing import Observer
from elastictrain.train.parameters import float8_layers

STEPS = int(os.environ.get("BENCH_STEPS", "20"))
BLOCKS = int(os.environ.get("BENCH_BLOCKS", "5"))
ALL_LOGITS = os.environ.get("BENCH_LOSS") == "logits"


class HandWritten:
    """A loop without anything: model, AdamW, clipping, and the loss printed now and then."""

    def __init__(self, config: RunConfig, context: TrainContext) -> None:
        task, device = build_task(config), context.group.device
        self.task, self.device, self.config = task, device, config
        with torch.device("meta"):
            model = task.build_model()
        self.renew: Callable[[], None] = lambda: None
        if config.train.precision == "fp8":
            self._use_torchao(model, config)
        if config.train.compile:
            for block in task.blocks(model):
                block.compile()
        bf16 = config.train.precision != "fp32"
        self.context = nullcontext
        if config.parallel.kind == "ddp":
            model.to_empty(device=device)
            self._fill(model)
            self.model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
            if bf16:
                self.context = lambda: torch.autocast(device.type, dtype=torch.bfloat16)
        else:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
            for block in task.blocks(model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            model.to_empty(device=device)
            self._fill(model)
            self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.data = context.samples.train.dataset
        self.next = 0
        self.passes = config.train.global_batch // (config.train.micro_batch * dist.get_world_size())

    def _use_torchao(self, model: nn.Module, config: RunConfig) -> None:
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        gathers = config.parallel.kind != "ddp" and config.train.fp8_scaling == "tensorwise"
        options = Float8LinearConfig.from_recipe_name(config.train.fp8_scaling)
        if gathers:
            options = replace(options, enable_fsdp_float8_all_gather=True)
            self.renew = lambda: precompute_float8_dynamic_scale_for_fsdp(self.model)
        chosen = set(float8_layers(self.task, model))
        convert_to_float8_training(model, config=options, module_filter_fn=lambda module, _: module in chosen)

    def _fill(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.normal_(parameter, 0.0, 0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
            for name, buffer in model.named_buffers():
                self.task.init_buffer(name, buffer)

    def batch(self) -> dict[str, torch.Tensor]:
        size = self.config.train.micro_batch
        rows = [self.data[(self.next + index) % len(self.data)]["tokens"] for index in range(size)]
        self.next += size
        return {"tokens": torch.stack(rows).to(self.device, non_blocking=True)}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if ALL_LOGITS:
            tokens = batch["tokens"]
            return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        output = self.task.loss(self.model, batch)
        return output.loss_sum / output.weight

    def step(self, number: int) -> None:
        for index in range(self.passes):
            last = index == self.passes - 1
            sync = nullcontext()
            if isinstance(self.model, DistributedDataParallel):
                sync = nullcontext() if last else self.model.no_sync()
            elif self.config.parallel.kind != "ddp":
                self.model.set_requires_gradient_sync(last)
                self.model.set_reshard_after_backward(last)
            with sync:
                with self.context():
                    loss = self.loss(self.batch()) / self.passes
                loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.renew()
        if number % 10 == 0:
            loss.item()


class MeasuredError(Exception):
    """All blocks are done. It ends the loop before the save at the end, which is not part of a step."""


class Interleaving(Observer):
    """Stands where the observer stands: times our blocks, and runs the other loop between them."""

    def __init__(self, other: HandWritten | None, synchronize: Callable[[], None]) -> None:
        self.other = other
        self.synchronize = synchronize
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.began = 0.0

    def run_other(self, *, counts: bool) -> None:
        """A block of the other loop, if there is one."""
        if self.other is None:
            return
        dist.barrier()
        began = time.perf_counter()
        for number in range(STEPS):
            self.other.step(number)
        self.synchronize()
        if counts:
            self.theirs.append((time.perf_counter() - began) / STEPS)

    def on_step(self, step: Step, *, step_s: float, skipped_total: int) -> None:
        if step.step % STEPS:
            return
        self.synchronize()
        if step.step > STEPS:
            self.ours.append((time.perf_counter() - self.began) / STEPS)
        self.run_other(counts=step.step > STEPS)
        dist.barrier()
        if len(self.ours) == BLOCKS:
            raise MeasuredError
        self.began = time.perf_counter()


def main() -> int:
    # All ranks must name the same folder; the agent's id is what they share.
    folder = f"{tempfile.gettempdir()}/elastictrain-bench-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    fixed = (
        f"run.dir={folder}",
        f"train.steps={STEPS * (BLOCKS + 1) + 2}",
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
    torch.set_num_threads(config.run.num_threads)
    context = check_alone(config, identity, tracker=ProgressTracker(), stop_request=lambda: None)
    claim_memory(context)
    meet(context)
    form_group(context)
    cuda = context.group.device.type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else (lambda: None)
    tokens = config.train.global_batch * config.train.seq_len
    if os.environ.get("BENCH_ALONE") == "theirs":
        timing = Interleaving(HandWritten(config, context), synchronize)
        for _ in range(BLOCKS + 1):
            timing.run_other(counts=len(timing.ours) > 0)
            timing.ours.append(0.0)
        if identity.rank == 0:
            report(config, timing, tokens=tokens, world=identity.world_size, mfu_per_token=0.0)
        return
    loop = build(context, None)
    timing = Interleaving(None if os.environ.get("BENCH_ALONE") else HandWritten(config, context), synchronize)
    profile = torch.profiler.profile() if os.environ.get("BENCH_PROFILE") and identity.rank == 0 else None
    with profile or nullcontext(), suppress(MeasuredError):
        replace(loop, observer=timing).run()
    if profile is not None:
        print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=24, max_name_column_width=70))
    if identity.rank == 0:
        per_token = loop.observer.mfu_of(1.0)
        report(
            config,
            timing,
            tokens=tokens,
            world=identity.world_size,
            mfu_per_token=per_token or 0.0,
        )
    loop.abandon()


def report(config: RunConfig, timing: Interleaving, *, tokens: int, world: int, mfu_per_token: float) -> None:
    ours = statistics.median(timing.ours)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {config.run.num_threads} thread(s) a rank"
    print(f"{world} x {device}, torch {torch.__version__}: {' '.join(sys.argv[1:])}")
    if ours:
        mfu = f"  MFU {tokens / ours * mfu_per_token:.1%}" if mfu_per_token else ""
        print(f"ours          {ours * 1e3:9.2f} ms/step  {tokens / ours / world:10.0f} tokens/s/device{mfu}")
    if timing.theirs:
        theirs = statistics.median(timing.theirs)
        kind = "  with all logits" if ALL_LOGITS else ""
        print(f"hand-written  {theirs * 1e3:9.2f} ms/step  {tokens / theirs / world:10.0f} tokens/s/device{kind}")
    if timing.theirs and ours:
        ratios = [b / a for a, b in zip(timing.ours, timing.theirs, strict=True)]
        spread = f"blocks {min(ratios):.3f} to {max(ratios):.3f}"
        print(f"speed ratio ours / hand-written: {statistics.median(ratios):.3f} ({spread})")
    if torch.cuda.is_available():
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    leave_process(main())
