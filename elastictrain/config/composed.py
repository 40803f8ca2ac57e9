"""The groups of keys, and RunConfig: all groups of one run, validated and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import NonEmpty, Range
from elastictrain.config.optim import OptimGroup
from elastictrain.config.preflight import PreflightGroup


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Which run this is, and what makes it the same run again."""

    dir: Annotated[str, NonEmpty()]
    """Folder of the run: a path or any fsspec URL (s3://bucket/name). The same folder continues the same run."""

    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Everything random derives from it together with step and position."""

    on_change: Literal["stop", "continue"] = "stop"
    """What to do on resume when a key that changes the answer (seed, data, batch, model) is not what the stored config says."""

    on_held: Literal["stop", "wait"] = "stop"
    """What to do where another run trains in `dir`: end with exit code 75, or wait until that one has ended. One that gives no
    sign of life for 20 s counts as ended."""

    deterministic: bool = False
    """Ask torch for deterministic algorithms: a CUDA run is then repeatable bit for bit, at some cost in speed."""

    num_threads: Annotated[int, Range(1, 1024)] = 1
    """CPU threads per rank for torch's operators. It changes the bits of CPU arithmetic, so it is part of the run."""


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """What is trained: a class, and the keyword arguments of its constructor."""

    target: str
    """Key `task._target_`: dotted path of the task's class, e.g. `recipes.llama.LlamaTask` or `my_package.my_module.MyTask`."""

    options: Mapping[str, object]
    """Every other key under `task`, checked against the constructor's annotated parameters."""


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """One of several sources of training samples."""

    path: Annotated[str, NonEmpty()]
    """As `data.path`."""

    weight: Annotated[float, Range(0.0)] | tuple[tuple[Annotated[int, Range(0)], Annotated[float, Range(0.0)]], ...] = 1.0
    """Share of the samples, relative to the other sources; or pairs of a step and the weight from that step on."""


@dataclass(frozen=True, slots=True)
class DataGroup:
    """Where training samples come from, unless the task brings datasets of its own."""

    path: Annotated[str, NonEmpty()] = "stdlib"
    """Folder of token files (a path or any fsspec URL) made by `python -m elastictrain.data prepare`, or `stdlib`: the source
    text of the Python standard library that runs the program, prepared on first use."""

    sources: tuple[SourceGroup, ...] | None = None
    """Several folders of token files in place of `path`, and the weight of each: [{path: web, weight: 3}, {path: books, weight:
    1}]. A weight like [[0, 3], [1000, 1]] is 3 from step 0 on and 1 from step 1000 on."""

    packing: bool = False
    """Fill samples with whole documents, cut only where one is longer than `train.seq_len`, and tell the task which token
    belongs to which; false cuts the token files into samples regardless of documents."""

    cache_dir: str | None = None
    """Local folder in which remote token files and the `stdlib` corpus are kept; null for
    $XDG_CACHE_HOME/elastictrain, or ~/.cache/elastictrain."""

    cache_gb: Annotated[float, Range(0.0, exclusive=True)] = 20.0
    """Upper bound on what `cache_dir` may hold (10^9 bytes); the least recently used files are removed first."""

    holdout_samples: Annotated[int, Range(0)] = 0
    """Samples at the end of the token files (of each source) that are kept for evaluation and never trained on."""

    shuffle: bool = True
    """Visit samples in a seeded random order, another one each epoch; false for the order of the files."""

    workers: Annotated[int, Range(0, 256)] = 0
    """Processes that read ahead. With 0 a thread of the trainer reads token files ahead; a task's own samples, which may draw
    random numbers, are read when they are needed."""

    prefetch: Annotated[int, Range(1, 1024)] = 4
    """Micro-batches that are read ahead per rank."""

    ledger: bool = False
    """Write which sample each rank consumed at each step to <run.dir>/ledger/."""


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """How much is trained, in what portions, in which precision."""

    steps: Annotated[int, Range(1)]
    """Optimizer steps of the whole run."""

    global_batch: Annotated[int, Range(1)]
    """Samples per optimizer step, whatever the world size."""

    micro_batch: Annotated[int, Range(1)]
    """Samples per rank and forward pass, at most; set by memory."""

    seq_len: Annotated[int, Range(1)] = 1
    """Tokens per sample; used by token files."""

    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Of forward and backward (fp8: bf16, but for linear layers of blocks); parameters, reduction, optimizer: float32."""

    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """precision=fp8: one scale for a whole matrix, or one for each of its rows, which is more exact and slower."""

    clip_norm: Annotated[float, Range(0.0)] = 1.0
    """Gradients are scaled down to this global norm when theirs is larger; 0 for no clipping."""

    compile: bool = False
    """Compile each of the model's blocks (the whole model, if the task names no blocks) with torch.compile."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass to save memory: `full` keeps only each block's input, `selective` also keeps
    the results of every other matrix product and of attention."""

    max_skipped: Annotated[int, Range(0)] = 10
    """Non-finite steps in a row that are skipped before the run gives up."""

    init_from: Annotated[str, NonEmpty()] | None = None
    """First values of the model: the folder (a path or any fsspec URL) of a checkpoint of another run, or of safetensors files
    such as Hugging Face's. Read at step 0 only."""

    ema: Annotated[float, Range(0.0, 0.9999999)] | None = None
    """Decay per step of an exponential moving average of the weights, which is part of the state and evaluated instead of them;
    null for none."""

    eval_every_steps: Annotated[int, Range(0)] = 0
    """Optimizer steps between evaluations on held-out samples; 0 for none."""

    eval_samples: Annotated[int, Range(1)] = 256
    """Samples per evaluation, at most; the first ones of the held-out samples, the same each time."""

    stop_after_evals_without_gain: Annotated[int, Range(0, 1000)] = 0
    """Evaluations in a row without a lower loss than the lowest so far after which training ends, saved; 0: never."""


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """How the model is spread over ranks; it follows whatever world there is."""

    kind: Literal["ddp", "fsdp", "hsdp"]
    """`ddp`: a whole copy per rank. `fsdp`: sharded over all ranks. `hsdp`: sharded within a host, copied across hosts."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """nccl trains on GPUs, and ends with exit code 69 where torch can use none; gloo trains on the CPU, or on GPUs with
    `device=cuda`; `auto` is nccl where torch can use a GPU, else gloo. The recipes that are meant for GPUs say nccl."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda trains on GPUs with either backend, and ends with exit code 69 where torch can use none; cpu never uses one; `auto`
    follows the backend."""

    shard_size: Annotated[int, Range(0)] = 0
    """hsdp: ranks over which one copy is sharded; 0 for the ranks of one host. A world that it does not divide, or a
    size of 1, is sharded whole."""

    reshard_after_forward: bool = True
    """fsdp, hsdp: free a block's gathered parameters after its forward pass and gather them again for the backward pass; false
    trades memory for one gather less."""

    bucket_mb: Annotated[float, Range(0.0, exclusive=True)] = 25.0
    """ddp: size of the gradient buckets that are reduced together (2^20 bytes)."""

    @property
    def needs_gpu(self) -> str:
        """The setting that needs a GPU; empty if there is none."""
        return "parallel.device=cuda" if self.device == "cuda" else "parallel.backend=nccl" if self.backend == "nccl" else ""

    @property
    def avoids_gpu(self) -> bool:
        return self.device == "cpu" or (self.backend == "gloo" and self.device == "auto")


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """When state is saved, how much is kept, and what to do with what is damaged."""

    every_steps: Annotated[int, Range(0)] | Literal["auto"] = 100
    """Optimizer steps between checkpoints; 0 for none by step; `auto` learns an interval in seconds: the one that leaves the
    most time for training, by what a save costs and how often state is lost."""

    max_lost_s: Annotated[float, Range(1.0)] = 3600.0
    """Training in seconds that a failure may cost at most where `every_steps` is `auto`, if saves are fast enough."""

    every_minutes: Annotated[float, Range(0.0)] = 0.0
    """Minutes between checkpoints, in addition; 0 for none by time."""

    snapshot_every_steps: Annotated[int, Range(0)] | Literal["auto"] = "auto"
    """Optimizer steps between snapshots in host memory, from which a restarted worker continues; `auto` learns it: as often as
    snapshots take at most 1 % of the training time and find a free buffer; 0 for none but those that are on their way to
    storage."""

    buffers: Annotated[int, Range(0, 3)] = 3
    """Snapshots of each rank that host memory has room for; fewer where it has not. 0 keeps none: checkpoints are then written
    while training waits."""

    memory_dir: Annotated[str, NonEmpty()] = "/dev/shm"  # noqa: S108  # the folder in it is private, and checked
    """Folder in host memory (a tmpfs) for snapshots; each user and run gets a folder of its own in it."""

    replicate: bool = True
    """Keep each host's newest snapshot on another host, too; without effect on one host."""

    keep_last: Annotated[int, Range(1)] = 3
    """Newest valid checkpoints that are kept."""

    keep_every: Annotated[int, Range(0)] = 0
    """Checkpoints at multiples of this step are kept for good; 0 for none."""

    keep_best: Annotated[int, Range(0, 1000)] = 0
    """Checkpoints with the lowest loss of an evaluation that are kept, too; 0 for none."""

    on_invalid: Literal["stop", "fresh"] = "stop"
    """When checkpoint remnants exist and none is valid: stop with an error, or start over from step 0."""

    max_failed_saves: Annotated[int, Range(1)] = 3
    """Failed saves in a row after which the run stops."""

    key_env: str = ""
    """Environment variable that holds a secret of at least 32 bytes: manifests are signed with it, and nothing that is not is
    restored from storage. Empty for none."""

    shard_mb: Annotated[float, Range(1.0)] = 4096.0
    """Size at which a rank begins another shard file (2^20 bytes)."""

    manifest_mb: Annotated[float, Range(0.0, 128.0)] = 4.0
    """Size of a manifest (2^20 bytes) that all ranks share evenly; a host with more to list puts it in a part of its own."""


@dataclass(frozen=True, slots=True)
class TelemetryGroup:
    """What a person sees while the run continues. Events are always written, for every step."""

    log_every_steps: Annotated[int, Range(1)] = 10
    """Optimizer steps between lines on the terminal and points of the loggers."""

    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """`auto` shows a bar on a terminal and single lines elsewhere."""

    loggers: tuple[str | Mapping[str, object], ...] = ("tensorboard",)
    """Where metrics go beside the events: names (tensorboard, wandb, mlflow, prometheus), or groups of keys with `_target_`, a
    name or the dotted path of a class, and its options."""

    peak_tflops: Annotated[float, Range(0.0, exclusive=True)] | None = None
    """Dense peak of one device in the precision used (10^12 operations/s), for MFU; null looks the device up in a table."""

    flush_s: Annotated[float, Range(0.0, exclusive=True)] = 10.0
    """Longest time for which events and curves may be missing from a remote run.dir."""


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """How long anything may take before it counts as hung. The values form a ladder, checked when the config is composed."""

    rendezvous_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 900.0
    """Until all ranks have agreed on a new generation; a host that still fetches its data keeps the others waiting."""

    init_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 600.0
    """For any collective, and for any phase, until the first step is through: start-up, restore, compilation."""

    step_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 120.0
    """For any collective, and for any one part of a step (data, a forward or a backward pass, the update), from then on."""

    save_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 900.0
    """For one checkpoint to be durable."""

    shutdown_grace_s: Annotated[float, Range(0.0, exclusive=True)] = 20.0
    """For the end of a run to be orderly; after that the process ends itself."""

    notice_s: Annotated[float, Range(0.0, exclusive=True)] = 30.0
    """How long after a signal this host, or its workers, will be ended; where a notice names a time, that counts. 30 s are what
    Kubernetes leaves a pod, torchrun its workers, and Google Cloud and Azure a spot instance. What is not in storage by then
    stays in host memory."""

    heartbeat_s: Annotated[float, Range(0.0, exclusive=True)] = 1.0
    """Interval at which each rank tells the others where it is."""

    hang_multiple: Annotated[float, Range(1.0)] = 10.0
    """A part of a step may last this many times as long as this rank's own steps usually do, once it has done some of them."""

    hang_floor_s: Annotated[float, Range(0.0, exclusive=True)] = 10.0
    """A shorter silence is never taken for a hang, however short the steps are; `fault.step_timeout_s` is the longest."""

    compare_every_steps: Annotated[int, Range(0)] = 0
    """Replicas (DDP, HSDP) compare their parameters and optimizer state this often, besides before every snapshot and
    checkpoint; 0: then only."""

    straggler_exclude_after: Annotated[int, Range(0)] = 0
    """Steps for which a rank must have held up the others before its host is left out, if `launch.min_hosts` others remain;
    0: never. Needs the launcher. The event `straggler` names such a rank in any case."""

    on_poisoned: Literal["stop", "skip", "back"] = "stop"
    """A step that has failed three times in a row: stop (as after any `launch.max_failures`), skip its batch, or go back to the
    checkpoint before the newest one. Needs the launcher."""

    flight_recorder_entries: Annotated[int, Range(0)] = 2000
    """Collectives that the flight recorder remembers per rank for the dump after a failure; 0 turns it off."""

    @property
    def close_s(self) -> float:
        """For each of the logs and curves of a rank at its end: they are closed one after another, within the grace."""
        return self.shutdown_grace_s / 4


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """How `python -m elastictrain.launch` forms groups of hosts and restarts them. Without effect on a plain torchrun."""

    min_hosts: Annotated[int, Range(1)] = 1
    """Hosts below which the run waits instead of training."""

    max_hosts: Annotated[int, Range(0)] = 0
    """Hosts above which others wait as spares; 0 for as many as come."""

    processes: Annotated[int, Range(0)] = 0
    """Workers of each host; 0 for one for each GPU that is visible, or a single one without GPUs."""

    hosts: tuple[Annotated[str, NonEmpty()], ...] = ()
    """Names or addresses of the hosts, in the order of their ranks, where no cluster lists them; the first group waits
    for `min_hosts` of them, and for the rest for `join_s`. Without a list hosts are taken as they come."""

    address: str = ""
    """IP address at which the other hosts reach this one; empty for the one that the cluster names or the kernel uses."""

    join_s: Annotated[float, Range(0.0)] = 30.0
    """How long the first group waits for more hosts than `min_hosts`, unless all that the cluster promised are there."""

    wait_s: Annotated[float, Range(0.0)] = 3600.0
    """How long to wait for `min_hosts` before giving up; 0 for ever."""

    lost_s: Annotated[float, Range(0.5)] = 4.0
    """How long a host may be silent before the others continue without it."""

    poll_s: Annotated[float, Range(0.1)] = 1.0
    """Interval at which the roster is read; a host that waits shows a sign of life there as often."""

    grow: bool = True
    """Take in hosts that come while the group trains."""

    grow_after_s: Annotated[float, Range(0.0)] = 30.0
    """How long a host that comes late must have been there before training is interrupted for it."""

    grow_every_s: Annotated[float, Range(0.0)] = 300.0
    """Shortest time between a start and an interruption to take in more hosts."""

    max_failures: Annotated[int, Range(1)] = 3
    """Failures without progress in between, a newer step in storage or in host memory, after which the run gives up."""

    backoff_s: Annotated[float, Range(0.0)] = 1.0
    """Pause before the second start without progress; doubled each time, up to `backoff_limit_s`."""

    backoff_limit_s: Annotated[float, Range(0.0)] = 60.0
    """Longest pause between two starts."""

    retry_unfit_s: Annotated[float, Range(0.0)] = 600.0
    """When a host that was found unfit is checked again; 0 to leave at once with exit code 69."""

    max_hours: Annotated[float, Range(0.0)] = 0.0
    """Wall-clock limit after which the run is stopped and saved; 0 for none. A limit of Slurm is found by itself."""

    standbys: Annotated[int, Range(0)] | Literal["auto"] = "auto"
    """Processes that each host prepares beside training, to take the place of workers that die; auto for one, or
    one for each rank on hosts with GPUs."""

    log_dir: str = ""
    """Folder on the host in which the launcher keeps all that it and its workers print, in a file for each start; empty: none.
    Progress is shown in lines then."""

    notices: bool = True
    """Ask the cloud's metadata service whether this host is about to be taken away."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run. `model` belongs to the task and is checked against its constructor."""

    run: RunGroup
    task: TaskGroup
    model: Mapping[str, object]
    data: DataGroup
    train: TrainGroup
    optim: OptimGroup
    parallel: ParallelGroup
    checkpoint: CheckpointGroup
    fault: FaultGroup
    preflight: PreflightGroup
    telemetry: TelemetryGroup
    launch: LaunchGroup
