"""Records of everything that happens to a run, and the journal (JSONL) they are appended to."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from threading import Lock
from typing import ClassVar, Protocol


class AppendLog(Protocol):
    """A file that only grows."""

    def append(self, data: bytes) -> None:
        """Add `data` at the end; when this returns, the death of the process alone no longer loses it on a local disk."""

    def flush(self) -> None:
        """Make everything durable as far as the store allows within a bounded time; never raises."""

    def close(self) -> None:
        """Make everything durable; nothing may be appended afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all records; its name in the journal is the class attribute `event`."""

    event: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Event):
    """A group of ranks has come up."""

    event: ClassVar[str] = "start"
    world_size: int
    hosts: tuple[str, ...]
    backend: str
    device: str
    config_digest: str
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    """Duration of each phase of the start, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight(Event):
    """What was checked before a start. `stage` is `hosts` (each host and the links between them) or `group` (collectives)."""

    event: ClassVar[str] = "preflight"
    stage: str
    level: str
    reason: str
    """Why this level."""

    counts: Mapping[str, int]
    """By status."""

    findings: tuple[Mapping[str, object], ...]
    """The verdicts that are warnings or failures."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlanned(Event):
    """What was set on a host for NCCL and gloo, before any group was made."""

    event: ClassVar[str] = "transport"
    host: str
    interface: str | None
    rdma: str
    variables: Mapping[str, str]
    reasons: Mapping[str, str]
    kept: Mapping[str, str]
    """What a person has set, and was left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Event):
    """State was restored, or begun (`step` 0, `tier` "none")."""

    event: ClassVar[str] = "resume"
    step: int
    tier: str
    checkpoint: str | None
    bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """One optimizer step was committed. Values are null where they were not finite."""

    event: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    grad_norm: float
    positions: tuple[int, int]
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(Event):
    """A step's update was left out because its loss or gradient was not finite."""

    event: ClassVar[str] = "skip"
    step: int
    loss: float
    grad_norm: float
    positions: tuple[int, int]
    in_a_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """The loss on held-out samples."""

    event: ClassVar[str] = "eval"
    step: int
    loss: float
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Event):
    """The state of a step is whole in host memory. `bytes` and times are this rank's."""

    event: ClassVar[str] = "snapshot"
    step: int
    slot: int
    bytes: int
    copy_s: float
    """From the first to the last byte, beside training."""
    stall_s: float
    """How long training waited: to begin, and before the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperStarted(Event):
    """A host's keeper answers this rank."""

    event: ClassVar[str] = "keeper_started"
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLost(Event):
    """A host's keeper is gone without having been asked to; another one is started."""

    event: ClassVar[str] = "keeper_lost"
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated(Event):
    """A snapshot of a rank of this host is whole in the memory of another host, too."""

    event: ClassVar[str] = "replicated"
    of_rank: int
    step: int
    host: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFailed(Event):
    """A snapshot could not be copied to the other host; newer ones are tried."""

    event: ClassVar[str] = "replication_failed"
    of_rank: int
    step: int
    host: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShort(Event):
    """Host memory has less room for snapshots than was wanted, and what follows."""

    event: ClassVar[str] = "memory_short"
    buffers: int
    replicate: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiverged(Event):
    """Replicas hold different parameters or optimizer state: the run ends, and nothing is saved of the step."""

    event: ClassVar[str] = "replicas_diverged"
    step: int
    ranks: tuple[int, ...]
    """Those that differ from the majority of their replicas; all of them where there is no majority."""

    hosts: tuple[str, ...]
    majority: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is committed: durable, and found by the next start."""

    event: ClassVar[str] = "checkpoint_saved"
    step: int
    checkpoint: str
    reason: str
    bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSlow(Event):
    """A save is still under way after a time in which most are done; `trouble` is the last thing that storage complained of."""

    event: ClassVar[str] = "checkpoint_slow"
    step: int
    seconds: float
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A save failed; the run goes on."""

    event: ClassVar[str] = "checkpoint_failed"
    step: int
    error: str
    in_a_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected(Event):
    """A checkpoint was not taken, and why."""

    event: ClassVar[str] = "checkpoint_rejected"
    checkpoint: str
    file: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPruned(Event):
    """Checkpoints that newer valid ones supersede were deleted."""

    event: ClassVar[str] = "checkpoints_pruned"
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Event):
    """This rank ends because of an error."""

    event: ClassVar[str] = "failure"
    exit_code: int
    error: str
    phase: str
    step: int
    last_heard: Mapping[str, str]
    """For each other rank: where it was when it was last heard, and how long ago."""
    flight_recorder: str | None
    """Key of the last collectives of this rank; written after this record, so it is missing where even that hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Event):
    """Ranks made no progress for longer than they may, and are ended. Told by whoever ends them: themselves, or their host."""

    event: ClassVar[str] = "hang"
    guilty: tuple[str, ...]
    """`rank 3 on host b`; empty where all wait at the same place."""

    hosts: tuple[str, ...]
    reason: str
    phase: str
    step: int
    silent_s: float
    bound_s: float
    waiting: Mapping[str, str]
    """For each rank that waited for them, as far as it was heard: where."""

    text: str
    stacks: str | None
    """Key of the stacks of the ranks of this host; written after this record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Event):
    """The run ends on purpose: finished, or asked to."""

    event: ClassVar[str] = "stop"
    step: int
    reason: str
    exit_code: int
    seconds: float
    saved: str
    """The safest place that `saved_step` had reached by then: `storage`, `peer`, `memory` or `nothing`. Keepers go on writing
    what is in memory as long as their hosts live."""

    saved_step: int


def encode(event: Event, *, now: float, incarnation: str, rank: int) -> bytes:
    """One line of JSON (with its newline); floats in full precision, non-finite ones as null."""
    record: dict[str, object] = {"time": now, "event": event.event, "incarnation": incarnation, "rank": rank}
    for field in fields(event):
        record[field.name] = _plain(getattr(event, field.name))
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


class Journal:
    """Appends events of one rank to its log; safe to use from several threads."""

    def __init__(self, log: AppendLog, *, incarnation: str, rank: int, clock: Callable[[], float] = time.time) -> None:
        self._log = log
        self._incarnation = incarnation
        self._rank = rank
        self._clock = clock
        self._lock = Lock()

    def record(self, event: Event) -> None:
        """Append one event."""
        with self._lock:
            self._log.append(encode(event, now=self._clock(), incarnation=self._incarnation, rank=self._rank))

    def flush(self) -> None:
        """Make the events so far durable, if the store allows."""
        self._log.flush()

    def close(self) -> None:
        """Make all events durable."""
        with self._lock:
            self._log.close()
