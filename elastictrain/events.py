"""The events of a run, and the journal (JSONL) to which they are appended."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock
from typing import Protocol

import msgspec

_BOOTED = "ELASTICTRAIN_BOOTED"  # when this host has booted, in Unix seconds by the clock at the start of its launcher


def _booted_s() -> float:
    with suppress(KeyError, ValueError):
        return float(os.environ[_BOOTED])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


_BOOTED_AT_S = _booted_s()


def event_time() -> float:
    """Unix seconds by the clock at the start of this host's launcher, or else of this process: a clock that is set later would
    change the order of events."""
    return _BOOTED_AT_S + time.clock_gettime(time.CLOCK_BOOTTIME)


def share_event_clock() -> None:
    """As a launcher: the processes that this one starts date their events as it does."""
    os.environ[_BOOTED] = repr(_BOOTED_AT_S)


class AppendLog(Protocol):
    """A file that only grows."""

    def append(self, data: bytes) -> None:
        """Append `data`; once this returns, the death of the process alone does not lose it on a local disk."""

    def flush(self) -> None:
        """Send what waits, in bounded time; never raises. On a local disk only `close` makes it outlast the host's loss."""

    def close(self) -> None:
        """Make everything durable; no append may follow."""


class Event(msgspec.Struct, frozen=True):
    """Base of all records; the tag of each is its name in the journal."""

    @property
    def event(self) -> str:
        return str(self.__struct_config__.tag)


class Start(Event, tag="start", frozen=True):
    """A group of ranks has started."""

    world_size: int
    hosts: tuple[str, ...]
    backend: str
    device: str
    config_digest: str
    versions: Mapping[str, str]
    seconds: Mapping[str, float]  # duration of each phase of the start, by name
    pids: Mapping[str, int] = {}  # the processes by rank


class FirstStep(Event, tag="first_step", frozen=True):
    """The first step of a start is done. `seconds` are all since the command, by part; a recovery has a record of its own."""

    step: int
    seconds: Mapping[str, float]


class Recovery(Event, tag="recovery", frozen=True):
    """Training goes on after a failure: the first step of the next generation is done. `seconds` has the time since the
    launcher noticed the failure (`total`) and its parts."""

    rung: str  # `in_place`, `restart` or `regroup`
    reason: str
    lost: tuple[str, ...]  # what has died or hung
    seconds: Mapping[str, float]
    resumed_step: int
    steps_repeated: int  # steps whose figures were known before the failure, and that are done again
    world_size: int
    pids: Mapping[str, int]  # the processes by rank


class Preflight(Event, tag="preflight", frozen=True):
    """Checks before a start. `stage` is `hosts` (each host and the links between them) or `group` (collectives)."""

    stage: str
    level: str
    reason: str
    counts: Mapping[str, int]
    findings: tuple[Mapping[str, object], ...]  # verdicts that are warnings or failures
    seconds: float


class TransportPlanned(Event, tag="transport", frozen=True):
    """Variables set on a host for NCCL and gloo, before any group was created."""

    host: str
    interface: str | None
    rdma: str
    variables: Mapping[str, str]
    reasons: Mapping[str, str]
    kept: Mapping[str, str]  # variables that a person has set, which stay


class Resume(Event, tag="resume", frozen=True):
    """State was restored, or initialized (`step` 0, `tier` "none")."""

    step: int
    tier: str
    checkpoint: str | None
    bytes: int
    seconds: Mapping[str, float]


class Compiled(Event, tag="compiled", frozen=True):
    """The first step of a start is through: what it found compiled, and what it has compiled itself. Only with
    `train.compile`."""

    key: str  # of code, shapes, device and versions
    loaded: str | None  # the archive that this process read from the run's folder
    found_files: int  # in the folder that the host's workers share, before the first step
    new_files: int
    stored: str | None  # the archive that this process wrote
    seconds: Mapping[str, float]


class Step(Event, tag="step", frozen=True):
    """An optimizer step was committed. Non-finite values are null."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    positions: tuple[int, int]
    samples_per_s: float
    tokens_per_s: float | None  # None where the task does not count tokens
    metrics: Mapping[str, float] = {}  # of the task
    mfu: float | None = None  # None where the FLOPs of the task or of the device are not known
    waits: Mapping[str, float] = {}  # seconds since the step before for which workers waited: `data`, `save`, `straggler`


class Skip(Event, tag="skip", frozen=True):
    """A step's update was skipped because its loss or gradient was not finite."""

    step: int
    loss: float
    grad_norm: float
    positions: tuple[int, int]
    in_a_row: int


class StepSkipped(Event, tag="step_skipped", frozen=True):
    """A step that failed again and again was passed over: its samples are not read, and nothing is updated."""

    step: int
    positions: tuple[int, int]


class StragglerFound(Event, tag="straggler", frozen=True):
    """A rank holds up the others, or has ceased to (`over`). Times are medians of the last steps."""

    step: int
    of_rank: int
    host: str
    phase: str
    own_s: float  # how long it works on this phase in a step
    others_s: float  # the median of the other ranks
    step_s: float
    steps: int  # since it was slow for the first time
    over: bool


class Evaluated(Event, tag="eval", frozen=True):
    """The held-out samples were evaluated after a step. `loss` is their mean; `seconds`: how long it took."""

    step: int
    loss: float
    samples: int
    seconds: float
    metrics: Mapping[str, float] = {}  # of the task


class Snapshot(Event, tag="snapshot", frozen=True):
    """The state of a step is whole in host memory. `bytes` and times are this rank's."""

    step: int
    slot: int
    bytes: int
    copy_s: float  # from the first to the last byte, in parallel with training
    stall_s: float  # how long training waited: to begin, and before the update


class KeeperStarted(Event, tag="keeper_started", frozen=True):
    """A host's saver has answered this rank."""

    pid: int


class KeeperLost(Event, tag="keeper_lost", frozen=True):
    """A host's saver has ended unexpectedly; another one is started."""

    pid: int


class Replicated(Event, tag="replicated", frozen=True):
    """A snapshot of a rank of this host is whole in the memory of another host, too."""

    of_rank: int
    step: int
    host: str
    bytes: int
    seconds: float


class ReplicationFailed(Event, tag="replication_failed", frozen=True):
    """A snapshot could not be copied to the other host; newer ones are tried."""

    of_rank: int
    step: int
    host: str
    error: str


class MemoryShort(Event, tag="memory_short", frozen=True):
    """Host memory has less room for snapshots than was wanted; `message` has the consequence."""

    buffers: int
    replicate: bool
    message: str


class ReplicasDiverged(Event, tag="replicas_diverged", frozen=True):
    """Replicas have different parameters or optimizer state: the run ends, and the step is not saved."""

    step: int
    ranks: tuple[int, ...]  # those that differ from the majority of their replicas; all of them if there is no majority
    hosts: tuple[str, ...]
    majority: bool


class CheckpointSaved(Event, tag="checkpoint_saved", frozen=True):
    """A checkpoint is committed: durable, and visible to the next start."""

    step: int
    checkpoint: str
    reason: str
    bytes: int
    seconds: Mapping[str, float]


class SaveIntervalChosen(Event, tag="save_interval", frozen=True):
    """With `checkpoint.every_steps=auto`: the interval between checkpoints from now on, and what it follows from."""

    step: int
    seconds: float
    limited_by: str  # `max_lost_s`, or `write_s`: saves would overlap; empty if nothing keeps it from the best one
    save_s: float  # training time that a save takes
    write_s: float  # from a save to its commit
    recover_s: float  # from a failure to the first step
    losses: int  # failures of this job after which it went on from storage
    kept: int  # those after which it went on from the memory of hosts
    trained_s: float  # in which these came
    mean_time_to_loss_s: float  # as far as that shows it


class CheckpointSlow(Event, tag="checkpoint_slow", frozen=True):
    """A save takes longer than most; `trouble` is the last warning of storage."""

    step: int
    seconds: float
    trouble: str | None


class CheckpointFailed(Event, tag="checkpoint_failed", frozen=True):
    """A save failed; the run continues."""

    step: int
    error: str
    in_a_row: int


class CheckpointRejected(Event, tag="checkpoint_rejected", frozen=True):
    """A checkpoint was refused, and why."""

    checkpoint: str
    file: str | None
    reason: str


class CheckpointsPruned(Event, tag="checkpoints_pruned", frozen=True):
    """Checkpoints that newer valid ones supersede were deleted."""

    checkpoints: tuple[str, ...]


class Failure(Event, tag="failure", frozen=True):
    """This rank ends because of an error."""

    exit_code: int
    error: str
    phase: str
    step: int
    last_heard: Mapping[str, str]  # by other rank: its phase when it was last heard, and how long ago
    flight_recorder: str | None  # key of its last collectives; written after this record, so missing where even that hung


class Hang(Event, tag="hang", frozen=True):
    """Ranks made no progress within their limit, and are ended. The process that ends them records it."""

    guilty: tuple[str, ...]  # `rank 3 on host b`; empty if all wait at the same place
    hosts: tuple[str, ...]
    reason: str
    phase: str
    step: int
    silent_s: float
    bound_s: float
    waiting: Mapping[str, str]  # where each rank waited for them, as far as it was heard
    text: str
    stacks: str | None  # key of the stacks of this host's ranks; written after this record


class CollectiveFaultFound(Event, tag="collective_fault", frozen=True):
    """The flight recorders of the ranks differ: the first collective that they do not call alike. Written beside a `hang`."""

    kind: str
    """`op`, `size`, `dtype`: another call than the others'; `order`, `extra`, `skipped`: other calls in a row; `missing`: no
    call; `not_started`: called, but not begun on the device."""
    group: str
    sequence: int  # the number of the collective in its process group
    culprits: tuple[str, ...]  # `rank 3 on host b`; all of them if none is the minority
    others: tuple[str, ...]
    calls: Mapping[str, str]  # by rank, its operation, sizes and dtypes
    text: str


class Stop(Event, tag="stop", frozen=True):
    """The run ends on purpose: finished, or asked to."""

    step: int
    reason: str
    exit_code: int
    seconds: float
    saved: str
    """Safest place of `saved_step` by then: `storage`, `handover`, `peer`, `memory` or `nothing`. Savers continue to
    write what is in memory while their hosts live; `handover`: hosts that take part in the next generation have it."""
    saved_step: int


def encode(event: Event, *, now: float, incarnation: str, rank: int) -> bytes:
    """One line of JSON (with its newline); floats in full precision, non-finite ones as null."""
    record: dict[str, object] = {"time": now, "event": event.event, "incarnation": incarnation, "rank": rank}
    record |= {name: _plain(getattr(event, name)) for name in event.__struct_fields__}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


class Journal:
    """Appends events of one rank to its log; thread-safe."""

    def __init__(self, log: AppendLog, *, incarnation: str, rank: int, clock: Callable[[], float] = event_time) -> None:
        self._log = log
        self._incarnation = incarnation
        self._rank = rank
        self._clock = clock
        self._lock = Lock()

    def record(self, event: Event) -> None:
        with self._lock:
            self._log.append(encode(event, now=self._clock(), incarnation=self._incarnation, rank=self._rank))

    def flush(self) -> None:
        """Send the events that wait; never raises."""
        self._log.flush()

    def close(self) -> None:
        with self._lock:
            self._log.close()
