"""`--dry-run`: the memory that a configuration needs of each GPU, and which micro-batch and checkpointing fit into one."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast

import torch

from elastictrain.config.composed import RunConfig
from elastictrain.config.task_signature import build_task
from elastictrain.data.assignment import Share
from elastictrain.data.dataset import Batch
from elastictrain.data.samples import SampleReader
from elastictrain.errors import ElasticTrainError, UsageError
from elastictrain.identity import Identity
from elastictrain.train.checks import measure_state, open_samples
from elastictrain.train.context import Samples
from elastictrain.train.memory_trace import Peak, Use, trace_step
from elastictrain.train.task import BringsDatasets, HasBlocks, Task

Checkpointing = Literal["none", "selective", "full"]

_GPUS = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?(\d+)", re.ASCII)
_CONTEXT_BYTES = 2_000_000_000  # of a process on a device, with its libraries, which torch's allocator does not count
_STANDBY_BYTES = 1_330_000_000  # of one that is parked (docs/benchmarks.md)
_USABLE = 0.9  # of a GPU: the rest is for gaps between the blocks of torch's allocator (see `suggest`)
_MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")  # the less is computed twice, the faster


@dataclass(frozen=True, slots=True)
class GpuSet:
    """The GPUs that a run would have; `num_bytes` of one, None if that is not known."""

    hosts: int
    per_host: int
    num_bytes: int | None

    @property
    def number(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True, slots=True)
class BlankTokens:
    """Samples like those of token files, of zeros."""

    seq_len: int
    packing: bool
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Batch:
        tokens = torch.zeros(self.seq_len + 1, dtype=torch.int64)
        return {"tokens": tokens, "documents": tokens} if self.packing else {"tokens": tokens}


def dry_run(config: RunConfig, identity: Identity, *, gpus: str) -> str:
    """What to print. `gpus`: as typed after `--dry-run`. Raises: ElasticTrainError."""
    found = read_gpu_set(gpus, identity)
    task = cast(Task, build_task(config))
    rank = replace(identity, rank=0, world_size=found.number, local_rank=0, local_world_size=found.per_host)
    train = config.train
    samples = open_samples(task, config) if isinstance(task, BringsDatasets) else blank_samples(config)
    standbys = found.per_host if config.launch.standbys == "auto" else config.launch.standbys
    beside_bytes = _CONTEXT_BYTES + -(-standbys // found.per_host) * _STANDBY_BYTES

    @cache
    def measure(mode: Checkpointing, micro_batch: int) -> Peak:
        changed = replace(train, activation_checkpointing=mode, micro_batch=micro_batch)
        return trace_step(replace(config, train=changed), task, rank, samples=samples)

    logging.disable(logging.WARNING)  # what torch says of tensors that training never sees
    try:
        peak = measure(train.activation_checkpointing, train.micro_batch)
    except ElasticTrainError:
        raise
    except Exception as error:  # noqa: BLE001  # of torch or of the task, which want to see what a tensor has in it
        return _state_alone(config, task, error)
    finally:
        logging.disable(logging.NOTSET)
    share = Share(train.global_batch, train.micro_batch, found.number, 0)
    lines = [describe_peak(config, peak, gpus=found, passes=share.passes_per_step, beside_bytes=beside_bytes)]
    if found.num_bytes is not None:
        limit_bytes = int(_USABLE * found.num_bytes) - beside_bytes
        modes = _MODES if isinstance(task, HasBlocks) else _MODES[:1]
        largest = max(1, train.global_batch // found.number)
        chosen = suggest(lambda *setting: measure(*setting).num_bytes, modes=modes, largest=largest, limit_bytes=limit_bytes)
        lines.append(describe_choice(chosen, num_bytes=found.num_bytes, beside_bytes=beside_bytes))
    return "\n".join(lines)


def read_gpu_set(text: str, identity: Identity) -> GpuSet:
    """Those that were typed; else those of this host. Raises: UsageError."""
    if text:
        match = _GPUS.fullmatch(text)
        hosts, per_host, gigabytes = (int(part or 1) for part in match.groups()) if match else (0, 0, 0)
        if not hosts * per_host * gigabytes:
            raise UsageError(f"--dry-run must be followed by [[HOSTSx]GPUSx]GB, as in 80, 8x80 or 2x8x80, but not by {text!r}")
        return GpuSet(hosts, per_host, gigabytes * 10**9)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_bytes = torch.cuda.get_device_properties(0).total_memory if there else None
    if identity.launched:
        return GpuSet(identity.world_size // identity.local_world_size, identity.local_world_size, num_bytes)
    return GpuSet(1, max(1, there), num_bytes)


def suggest(
    measure: Callable[[Checkpointing, int], int], *, modes: Sequence[Checkpointing], largest: int, limit_bytes: int
) -> tuple[Checkpointing, int, int] | None:
    """The first of `modes` that fits, with the largest micro-batch, a power of two up to `largest`, and its bytes; None if
    nothing fits. `measure`: the bytes of a mode and a micro-batch. Pure but for `measure`.

    `limit_bytes` assumes that gaps between blocks take up to a tenth of the GPU. Where memory is plenty torch's allocator
    reserves 3 to 37 % more than it hands out (docs/benchmarks.md), but before it runs out it gives back what is not in use."""
    for mode in modes:
        if (one := measure(mode, 1)) > limit_bytes:
            continue
        size = 1
        if largest > 1:
            # Activations grow with the micro-batch, and nothing else does.
            each = max(1, measure(mode, 2) - one)
            while 2 * size <= min(largest, 1 + (limit_bytes - one) // each):
                size *= 2
        while size > 1 and measure(mode, size) > limit_bytes:
            size //= 2
        return mode, size, measure(mode, size)
    return None


def describe_peak(config: RunConfig, peak: Peak, *, gpus: GpuSet, passes: int, beside_bytes: int) -> str:
    """A table in GB, below the settings that it holds for. `beside_bytes`: of a GPU, outside of torch's allocator. Pure."""
    train, total_bytes = config.train, peak.num_bytes + beside_bytes
    setting = (
        f"parallel={config.parallel.kind} train.precision={train.precision} train.compile={str(train.compile).lower()} "
        f"train.activation_checkpointing={train.activation_checkpointing} train.micro_batch={train.micro_batch}"
    )
    rows = [(str(use), peak.uses.get(use, 0)) for use in Use]
    rows.append((f"peak, in the phase `{peak.phase}`", peak.num_bytes))
    rows.append(("beside torch's allocator", beside_bytes))
    rows.append(("together", total_bytes))
    table = "\n".join(f"  {name:<32}{num_bytes / 1e9:>9.2f} GB" for name, num_bytes in rows)
    each = f"each of {gpus.number} GPUs" if gpus.number > 1 else "one GPU"
    return f"Memory of {each}, passes a step: {passes}\n{setting}\n{table}"


def describe_choice(chosen: tuple[Checkpointing, int, int] | None, *, num_bytes: int, beside_bytes: int) -> str:
    gpu = f"{num_bytes / 1e9:.0f} GB"
    if chosen is None:
        return f"Nothing fits into {gpu}: take more or larger GPUs, or parallel=fsdp"
    mode, micro_batch, needed = chosen
    setting = f"train.activation_checkpointing={mode} train.micro_batch={micro_batch}"
    return f"Suggested for {gpu}: {setting} ({(needed + beside_bytes) / 1e9:.1f} GB)"


def blank_samples(config: RunConfig) -> Samples:
    """What a task without datasets of its own would read from token files."""
    tokens = BlankTokens(config.train.seq_len, config.data.packing, config.train.global_batch)
    return Samples(SampleReader(tokens), None, "")


def _state_alone(config: RunConfig, task: Task, error: Exception) -> str:
    size = measure_state(task, config.optim, averaged=config.train.ema is not None)
    why = f"a step cannot be traced without its content ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if size is None:
        return f"The memory is not known: {why}, and the model not built without memory"
    parts = {"parameters": size.parameters, "gradients": size.gradients, "optimizer": size.optimizer, "buffers": size.buffers}
    shown = ", ".join(f"{name} {num_bytes / 1e9:.2f} GB" for name, num_bytes in parts.items())
    return f"Of all ranks together: {shown}. Activations are not known: {why}"
