"""What a standby prepares before it has a rank: the model, and a first step that compiles it, on a group of its own."""

import gc
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice

import psutil
import torch
import torch.distributed as dist

from elastictrain.data.loader import MicroBatch
from elastictrain.distributed.generation import AgreedGeneration, Introduction
from elastictrain.distributed.group import lone_group
from elastictrain.distributed.reattach import detach, forget_step
from elastictrain.train.build import BuiltState, build_state
from elastictrain.train.checks import measure_state
from elastictrain.train.compile_cache import use_host_folder
from elastictrain.train.context import TrainContext
from elastictrain.train.parked_memory import ParkedMemory
from elastictrain.train.snapshot_memory import share_arena
from elastictrain.train.step import Stepper

logger = logging.getLogger(__name__)

_DETACH_S = 10.0
_LOWEST = 19  # priority: training beside it needs the processors
_LEAST_FREE = 0.1  # share of a device that must be free: what a standby keeps of it, about 1.3 GB, training may need later
_DEVICE_SHARE = 0.7  # of the free memory of a device that a standby may use for a moment: training beside it may need more
_PASSES = 2  # one that only adds to the gradients, and the last one, which reduces them
_ROOM = 3  # times the size of the state that must be free: a standby must not make a worker run out of memory


def has_room(context: TrainContext) -> bool:
    """Whether the device of this rank has memory for a standby beside training; True where it uses none."""
    if not context.on_gpu:
        return True
    free_bytes, total_bytes = torch.cuda.mem_get_info(context.identity.local_rank)
    return free_bytes >= _LEAST_FREE * total_bytes


def prepare(context: TrainContext, *, exact: bool) -> BuiltState | None:
    """What a standby builds before it has a rank; None if that could do harm, or without memory to spare. `exact`: it gets the
    rank of `context.identity`, or none. Collective: no."""
    on_device = context.on_gpu
    if not exact and (on_device or context.config.parallel.kind != "ddp"):
        # torch remembers per process which part of a tensor a rank has, by a mesh that is equal on all ranks; and this process
        # may get another rank.
        return None
    size = measure_state(context.task, context.config.optim, averaged=context.config.train.ema is not None)
    if not on_device and (size is None or psutil.virtual_memory().available < _ROOM * size.of_rank(shards=1)):
        return None
    if on_device:
        warm_backward()
    # The priority is the thread's own: the process that this one becomes must not keep it, and could not raise it again.
    with ThreadPoolExecutor(1, thread_name_prefix="prepare", initializer=partial(os.nice, _LOWEST)) as pool:
        built = pool.submit(_build_on_device if on_device else _build, context).result()
    if built is not None and on_device:
        # Not in the pool: the arena's thread would inherit the priority, and keep it.
        built = replace(built, arena=share_arena(context, built.state))
    return built


def warm_backward() -> None:
    """Start the device's threads for backward passes: they have the priority of the thread that needs them first."""
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def _build_on_device(context: TrainContext) -> BuiltState | None:
    """`_build` with at most a share of the device's free memory, which it gives back; None if that is too little."""
    device = torch.device("cuda", context.identity.local_rank)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(_DEVICE_SHARE * free_bytes / total_bytes, device)
    built = None
    try:
        built = _build(context)
        peak_bytes = torch.cuda.max_memory_reserved(device)
        parked = ParkedMemory.give(built.state.tensors().values(), peak_bytes=peak_bytes)
        built = replace(built, parked=parked)
    except torch.OutOfMemoryError:
        logger.info("no standby is built: a step needs more than the free %.1f GB of the device", free_bytes / 1e9)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return built


def forget() -> None:
    """Give back what a preparation that failed has left; its traceback must be gone."""
    detach(_DETACH_S)
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _build(context: TrainContext) -> BuiltState:
    identity = context.identity
    context.generation = AgreedGeneration("", (Introduction(identity.host, identity.local_world_size, context.backend, ""),))
    context.group = lone_group(identity, backend=context.backend, on_gpu=context.on_gpu)
    if context.backend == "nccl":
        _warm_nccl(context)
    use_host_folder(context.config, task=context.task, device=context.group.device)
    wrapped, state = build_state(context)
    _run_step(context, Stepper(context, wrapped, state.optimizer))
    detach(_DETACH_S)
    forget_step(wrapped.bare)
    wrapped.float8.forget()
    return BuiltState(wrapped, state)


def _warm_nccl(context: TrainContext) -> None:
    """Have NCCL load its kernels and look at the host, once per process, with a group of this rank alone."""
    group = dist.new_group([context.identity.rank], backend="nccl", use_local_synchronization=True)
    dist.all_reduce(torch.zeros(1, device=context.group.device), group=group)


def _run_step(context: TrainContext, stepper: Stepper) -> None:
    """The first passes of a step and its update: what a rank compiles, at little cost to training beside it."""
    number = min(context.share.passes_per_step, _PASSES)
    micro_batches = (MicroBatch.read(context.samples.train, one) for one in islice(context.plan_passes(0, 1), number))
    stepper.run(1, micro_batches, passes=number, rate=0.0).result()
