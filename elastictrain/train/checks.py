"""Checks that a rank makes alone before others wait for it: task, samples, run folder, devices and memory."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, cast

import psutil
import torch
from torch import nn

from elastictrain.cgroup import memory_groups
from elastictrain.checkpoint.run_folder import CONFIG_NAME, read_stored_config
from elastictrain.checkpoint.signing import signing_key
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import changed_answers, to_yaml
from elastictrain.config.optim import OptimGroup
from elastictrain.config.task_signature import build_task
from elastictrain.config.user_code import calling, describe_value, refuse
from elastictrain.data.dataset import Dataset
from elastictrain.data.opening import open_datasets
from elastictrain.data.samples import SampleReader, derive_seed
from elastictrain.distributed.device import Backend, find_backend, plan_environment
from elastictrain.distributed.float8 import check_float8
from elastictrain.distributed.wrapping import MeshShape, mesh_shape
from elastictrain.errors import (
    ConfigError,
    DataError,
    ElasticTrainError,
    HostUnfitError,
    ObjectNotFoundError,
    Problem,
    StorageError,
)
from elastictrain.identity import Identity
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.start_times import StartTimes
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import check_writable, open_store
from elastictrain.storage.private import temporary_folder
from elastictrain.storage.store import Store
from elastictrain.telemetry.loggers import make_loggers
from elastictrain.train.context import Samples, StopRequested, TrainContext
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.parameters import seed_everything
from elastictrain.train.task import (
    BringsDatasets,
    ChecksTokens,
    Collates,
    HasBlocks,
    HasNeutralOptions,
    InitializesParameters,
    Task,
)

logger = logging.getLogger(__name__)

_MOST_BYTES = 10**14  # more than any machine has
_TIGHT = 0.8


def check_alone(
    config: RunConfig,
    identity: Identity,
    *,
    tracker: ProgressTracker,
    stop_request: StopRequested,
    check_attached: Callable[[], None] = lambda: None,
    times: StartTimes | None = None,
) -> TrainContext:
    """Check what needs no other rank, and set torch's environment. `times` of the start, which go on here. Raises:
    ElasticTrainError."""
    times = times if times is not None else StartTimes()
    signing_key(config.checkpoint.key_env)
    make_loggers(config.telemetry.loggers)
    times.end_part("loggers")
    backend = choose_backend(config, identity)
    if config.train.precision == "fp8":
        on_gpu = backend == "nccl" or config.parallel.device == "cuda"
        check_float8(torch.device("cuda", identity.local_rank) if on_gpu else torch.device("cpu"))
    times.end_part("device")
    seed_everything(derive_seed(config.run.seed, "task"))
    task = cast(Task, build_task(config))
    if config.train.activation_checkpointing != "none" and not isinstance(task, HasBlocks):
        message = "needs a task that names its blocks (method `blocks`); set it to none"
        raise ConfigError([Problem("train.activation_checkpointing", message)])
    times.end_part("task")
    store = open_store(config.run.dir)
    if identity.local_rank == 0:
        # With several hosts the preflight names the one that cannot write; a rank that left earlier would only be missing.
        untested = identity.only_host or config.preflight.level == "off" or config.preflight.checks.storage == "off"
        check_run_folder(store, config, task=task, try_writing=untested)
    times.end_part("run_folder")
    samples = open_samples(task, config)
    times.end_part("data")
    return TrainContext(config, identity, tracker, stop_request, check_attached, backend, task, samples, store, times)


def choose_backend(config: RunConfig, identity: Identity) -> Backend:
    """The collective library; sets torch's environment for it. Raises: HostUnfitError, ConfigError."""
    backend, why_cpu = find_backend(
        config.parallel.backend,
        environment=os.environ,
        local_world_size=identity.local_world_size,
        device=config.parallel.device,
    )
    if why_cpu and identity.local_rank == 0:
        logger.warning("training on the CPU, not on a GPU: %s", why_cpu)
    # torch opens this path without checking what is there.
    dump_prefix = f"{temporary_folder()}/flight-r"
    os.environ.update(plan_environment(config.fault, backend=backend, dump_prefix=dump_prefix, present=os.environ))
    return backend


def set_determinism(config: RunConfig) -> None:
    """Before CUDA starts, which reads the variable."""
    if config.run.deterministic:
        # cuBLAS picks among algorithms at run time unless its workspace has a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def open_samples(task: Task, config: RunConfig) -> Samples:
    """Training samples and held-out samples. Raises: DataError, StorageError, ConfigError."""
    digest, mixture = "", None
    train: Dataset | None
    held_out: Dataset | None
    if isinstance(task, BringsDatasets):
        train, held_out = (_own_dataset(task, name, seed=config.run.seed) for name in ("train_dataset", "eval_dataset"))
        if not train:
            raise refuse(task, "train_dataset", "return a dataset of at least one sample", f"returned {describe_value(train)}")
    else:
        try:
            opened = open_datasets(config.data, seq_len=config.train.seq_len, global_batch=config.train.global_batch)
        except StorageError as error:
            raise type(error)(f"`data.path` cannot be used: {error}") from error
        train, held_out, digest, mixture = opened.train, opened.holdout, opened.digest, opened.mixture
        if isinstance(task, ChecksTokens):
            vocab_size = opened.index.tokenizer.vocab_size
            if problems := task.check_tokens(seq_len=config.train.seq_len, vocab_size=vocab_size):
                raise ConfigError(problems)
    if len(train) == 0:
        raise DataError([Problem("data.path", "must have at least one training sample, but has none")])
    if config.train.eval_every_steps and not held_out:
        raise DataError([Problem("train.eval_every_steps", "needs held-out samples, but there are none; set it to 0")])
    collate = task.collate if isinstance(task, Collates) else None
    draws = collate is not None or isinstance(task, BringsDatasets)
    seeds = [derive_seed(config.run.seed, name) if draws else None for name in ("training samples", "held-out samples")]
    readers = SampleReader(train, collate, seeds[0]), SampleReader(held_out, collate, seeds[1]) if held_out else None
    return Samples(*readers, digest, mixture)


def _own_dataset(task: Task, method: str, *, seed: int) -> Dataset | None:
    """What `train_dataset` or `eval_dataset` returns, under the same generators: a random split is the same in both."""
    seed_everything(derive_seed(seed, "datasets"))
    with calling(task, method):
        dataset: Dataset | None = getattr(task, method)()
    if dataset is None:
        return None
    if lacking := [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]:
        must, found = "return a dataset with __len__ and __getitem__(index)", f"returned {describe_value(dataset)} without "
        raise refuse(task, method, must, found + " and ".join(lacking))
    with calling(dataset, "__len__"):
        len(dataset)
    return dataset


def check_run_folder(store: Store, config: RunConfig, *, task: Task, try_writing: bool = True) -> None:
    """Check that the folder takes writes (`try_writing`) and that this configuration continues the run in it. Raises:
    StorageError; ConfigError that names the keys which would change the answer."""
    try:
        if try_writing:
            check_writable(store)
    except StorageError as error:
        raise type(error)(f"`run.dir` cannot be used: {error}. Set run.dir to another place, or mend this one.") from error
    if isinstance(store, LocalStore):
        store.sweep_temporaries("checkpoints")
    stored = read_stored_config(store)
    if stored is None or config.run.on_change == "continue":
        return
    neutral = task.neutral_options if isinstance(task, HasNeutralOptions) else ()
    changes = changed_answers(stored, now=config, neutral=neutral)
    # Checkpoints are listed only after a change: an ordinary start has none.
    if changes and any(info.key.startswith("checkpoints/step-") for info in store.list("checkpoints")):
        advice = "the run in `run.dir` has checkpoints; put it back, choose another run.dir, or set run.on_change=continue"
        raise ConfigError(
            [Problem(key, f"was {before!r} when the run began and is {now!r} now: {advice}") for key, before, now in changes]
        )


def store_config(store: Store, config: RunConfig) -> None:
    data = to_yaml(config).encode()
    try:
        there = store.read(CONFIG_NAME, end=len(data) + 1) == data
    except ObjectNotFoundError:
        there = False
    if not there:
        store.write(CONFIG_NAME, data)


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of a whole model, of the gradients and moments (and averages) of its trained parameters, and of its largest one."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    largest: int

    def of_rank(self, *, shards: int) -> int:
        """The least memory of a rank in bytes when `shards` ranks share the state; activations come on top."""
        state = self.parameters + self.gradients + self.optimizer
        # First values are made one whole parameter at a time.
        filling = _share(self.parameters, shards) + self.largest if shards > 1 else 0
        return max(_share(state, shards), filling) + self.buffers


@dataclass(frozen=True, slots=True)
class MemorySize:
    """The memory of one GPU, or of this host."""

    name: str
    total_bytes: int
    available_bytes: int


def measure_state(task: Task, optim: OptimGroup, *, averaged: bool = False) -> StateSize | None:
    """The size of what the task trains, `averaged` as well; None if its model cannot be built without memory. Raises:
    ConfigError if the model cannot be built at all."""
    try:
        with torch.device("meta"):
            model = task.build_model()
    except ElasticTrainError:
        raise
    except Exception as error:
        # torch itself refuses sizes beyond 64 bits.
        if isinstance(task, InitializesParameters) or "overflow" in str(error):
            first_line = str(error).strip().partition("\n")[0]
            message = f"must describe a model that can be built, but torch says {type(error).__name__}: {first_line}"
            raise ConfigError([Problem("model", message)]) from error
        return None
    optimizer_bytes = None
    if optim._target_ is not None:
        # torch asserts what an optimizer can do on a device only.
        with suppress(AssertionError):
            state = make_optimizers(model, optim, task).tensors(model.named_parameters())
            optimizer_bytes = sum(tensor.nbytes for _, tensor in state)
    size = size_of(model, optimizer_bytes=optimizer_bytes)
    return replace(size, optimizer=size.optimizer + size.gradients * averaged)


def size_of(model: nn.Module, *, optimizer_bytes: int | None = None) -> StateSize:
    """The size of a model on any device, trained with our AdamW unless its optimizer takes `optimizer_bytes`."""
    parameters = list(model.parameters())
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return StateSize(
        parameters=sum(parameter.nbytes for parameter in parameters),
        gradients=gradients,
        optimizer=2 * gradients if optimizer_bytes is None else optimizer_bytes,  # both moments
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        largest=max((parameter.nbytes for parameter in parameters), default=0),
    )


def judge_fit(
    size: StateSize,
    shape: MeshShape,
    *,
    kind: Literal["ddp", "fsdp", "hsdp"],
    local_world_size: int,
    snapshots: int,
    device: MemorySize | None,
    host: MemorySize,
) -> str:
    """Compare with the memory of this rank's GPU, or with that of the host where all of its ranks train on the CPU. Each rank
    keeps `snapshots` in host memory. Returns a warning; empty if there is room. Raises: HostUnfitError if it does not fit here;
    ConfigError if it fits nowhere."""
    memory, ranks = device or host, 1 if device is not None else local_world_size
    needed = ranks * size.of_rank(shards=shape.shards)
    spreading = f"spread over {shape.shards} ranks" if shape.shards > 1 else "whole on each rank"
    figures = (
        f"parameters {_gb(size.parameters)}, gradients {_gb(size.gradients)}, optimizer {_gb(size.optimizer)}, buffers "
        f"{_gb(size.buffers)}; {spreading} by parallel={kind}; activations not counted"
    )
    what = f"the state of {ranks} rank{'s' if ranks > 1 else ''} takes {_gb(needed)}"
    if needed > memory.available_bytes:
        has = f"{_gb(memory.available_bytes)} of {_gb(memory.total_bytes)} available"
        remedy = "set model.* to a smaller one, or spread it over more ranks" + (" by parallel=fsdp" * (kind == "ddp"))
        problem = f"{what}, but {memory.name} has {has} ({figures}): {remedy}"
        raise ConfigError(problem) if needed > _MOST_BYTES else HostUnfitError(problem)
    if needed > _TIGHT * memory.available_bytes:
        return f"memory is tight: {what}, and {memory.name} has {_gb(memory.available_bytes)} available ({figures})"
    kept_bytes = snapshots * _share((size.parameters + size.optimizer) * local_world_size, shape.world_size)
    if kept_bytes + (0 if device is not None else needed) > host.total_bytes:
        kept = f"{snapshots} snapshots in host memory take {_gb(kept_bytes)}"
        beside = "" if device is not None else f" and {what}"
        return f"memory is tight: {kept}{beside}, but {host.name} has {_gb(host.total_bytes)}"
    return ""


def _share(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def check_memory(context: TrainContext) -> None:
    """Raises: HostUnfitError if the state cannot fit here; ConfigError if it fits nowhere, or the model cannot be built."""
    size = measure_state(context.task, context.config.optim, averaged=context.config.train.ema is not None)
    if size is None:
        return
    config, identity = context.config, context.identity
    parallel, local_world_size = config.parallel, identity.local_world_size
    shape = mesh_shape(parallel, world_size=identity.world_size, local_world_size=local_world_size)
    device = None
    if context.on_gpu:
        total_bytes = torch.cuda.get_device_properties(identity.local_rank).total_memory
        device = MemorySize(torch.cuda.get_device_name(identity.local_rank), total_bytes, total_bytes)
    memory = psutil.virtual_memory()
    # A control group counts by its limit: its usage includes file caches that the kernel would free, of unknown size.
    total_bytes = min([int(memory.total), *(group.limit_bytes for group in memory_groups())])
    host = MemorySize("this host", total_bytes, min(total_bytes, int(memory.available)))
    snapshots = config.checkpoint.buffers
    if warning := judge_fit(
        size, shape, kind=parallel.kind, local_world_size=local_world_size, snapshots=snapshots, device=device, host=host
    ):
        logger.warning("%s", warning)
