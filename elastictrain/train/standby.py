"""What a standby prepares before it has a rank: the model, and a first step that compiles it, on a group of its own."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import psutil

from elastictrain.data.assignment import Share, passes
from elastictrain.data.loader import MicroBatch, read_batch
from elastictrain.distributed.generation import AgreedGeneration, Introduction
from elastictrain.distributed.group import lone_group
from elastictrain.distributed.reattach import detach, forget_step
from elastictrain.train.build import BuiltState, build_state
from elastictrain.train.checks import measure_state
from elastictrain.train.compile_cache import use_host_folder
from elastictrain.train.context import TrainContext
from elastictrain.train.step import StepFlags, Stepper

_DETACH_S = 10.0
_LOWEST = 19  # priority: training beside it needs the processors
_ROOM = 3  # times the size of the state that must be free: a standby must not make a worker run out of memory


def prepare(context: TrainContext) -> BuiltState | None:
    """What a standby builds before it has a rank; None if that could do harm, or without memory to spare. Collective: no."""
    size = measure_state(context.task)
    if context.backend == "nccl" or context.config.parallel.kind != "ddp":
        # torch remembers per process which part of a tensor a rank has, by a mesh that is equal on all ranks; and this process
        # may get another rank.
        return None
    if size is None or psutil.virtual_memory().available < _ROOM * size.of_rank(shards=1):
        return None
    # The priority is the thread's own: the process that this one becomes must not keep it, and could not raise it again.
    with ThreadPoolExecutor(1, thread_name_prefix="prepare", initializer=partial(os.nice, _LOWEST)) as pool:
        return pool.submit(_build, context).result()


def _build(context: TrainContext) -> BuiltState:
    identity = context.identity
    context.generation = AgreedGeneration("", (Introduction(identity.host, identity.local_world_size, context.backend, ""),))
    context.group = lone_group(identity, backend=context.backend)
    use_host_folder(context.config, task=context.task, device=context.group.device)
    wrapped, state = build_state(context)
    _run_step(context, Stepper(context, wrapped, state.optimizer))
    detach(_DETACH_S)
    forget_step(wrapped)
    return BuiltState(wrapped, state)


def _run_step(context: TrainContext, stepper: Stepper) -> None:
    config, identity, samples = context.config, context.identity, context.samples.train
    share = Share(config.train.global_batch, config.train.micro_batch, identity.world_size, identity.rank)
    planned = passes(
        0,
        last_step=1,
        share=share,
        num_samples=len(samples),
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    micro_batches = (
        MicroBatch(one.step, one.portion, one.sample_ids, read_batch(samples, one.sample_ids))
        for one in islice(planned, share.passes_per_step)
    )
    stepper.run(1, micro_batches, passes=share.passes_per_step, rate=0.0, flags=StepFlags()).result()
