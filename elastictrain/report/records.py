"""The events that a report is made of, as they are read: torn, garbled and unknown lines are left out, and counted."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastictrain.bounded_json import MalformedJsonError, as_record, parse_json

_NAME = re.compile(r"(?:generation-)?(\d{1,9})(?:-\w+)?")
_LAUNCHER = re.compile(r"launcher-(.+?)(?:\.part-\d+)?\.jsonl")


@dataclass(frozen=True, slots=True)
class StartRow:
    world_size: int
    hosts: Sequence[str]
    device: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResumeRow:
    step: int
    tier: str


@dataclass(frozen=True, slots=True)
class FirstStepRow:
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RecoveryRow:
    rung: str
    reason: str = ""
    lost: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRow:
    step: int
    loss: float | None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    positions: tuple[int, int] = (0, 0)
    waits: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.positions[1] - self.positions[0]

    @property
    def tokens(self) -> float | None:
        """None where the task does not count them."""
        if self.tokens_per_s is None or not self.samples_per_s:
            return None
        return self.samples * self.tokens_per_s / self.samples_per_s


@dataclass(frozen=True, slots=True)
class EvalRow:
    step: int
    loss: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    step: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class CompiledRow:
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SavedRow:
    step: int
    reason: str
    bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PreflightRow:
    stage: str
    level: str
    seconds: float
    counts: Mapping[str, int]
    findings: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True)
class FailureRow:
    exit_code: int
    error: str
    phase: str
    step: int
    flight_recorder: str | None = None


@dataclass(frozen=True, slots=True)
class HangRow:
    guilty: Sequence[str]
    hosts: Sequence[str]
    reason: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveFaultRow:
    kind: str
    group: str
    sequence: int
    culprits: Sequence[str]
    others: Sequence[str]
    calls: Mapping[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class DivergedRow:
    ranks: Sequence[int]
    hosts: Sequence[str]


@dataclass(frozen=True, slots=True)
class StopRow:
    step: int
    reason: str
    exit_code: int
    saved: str = ""


@dataclass(frozen=True, slots=True)
class LauncherStartedRow:
    launcher: str
    host: str
    processes: int


@dataclass(frozen=True, slots=True)
class GenerationRow:
    hosts: Sequence[str]
    world_size: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GenerationEndedRow:
    kind: str
    exit_code: int
    phase: str = ""
    step: int = 0
    reason: str = ""
    lost: str = ""
    died: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NoticeRow:
    reason: str
    leave: bool = False


@dataclass(frozen=True, slots=True)
class LauncherEndedRow:
    exit_code: int
    reason: str = ""


Row = (
    StartRow
    | ResumeRow
    | FirstStepRow
    | RecoveryRow
    | StepRow
    | EvalRow
    | SnapshotRow
    | CompiledRow
    | SavedRow
    | PreflightRow
    | FailureRow
    | HangRow
    | CollectiveFaultRow
    | DivergedRow
    | StopRow
    | LauncherStartedRow
    | GenerationRow
    | GenerationEndedRow
    | NoticeRow
    | LauncherEndedRow
)

KINDS: Mapping[str, type[Row]] = {
    "start": StartRow,
    "resume": ResumeRow,
    "first_step": FirstStepRow,
    "recovery": RecoveryRow,
    "step": StepRow,
    "eval": EvalRow,
    "snapshot": SnapshotRow,
    "compiled": CompiledRow,
    "checkpoint_saved": SavedRow,
    "preflight": PreflightRow,
    "failure": FailureRow,
    "hang": HangRow,
    "collective_fault": CollectiveFaultRow,
    "replicas_diverged": DivergedRow,
    "stop": StopRow,
    "launcher_started": LauncherStartedRow,
    "generation": GenerationRow,
    "generation_ended": GenerationEndedRow,
    "notice": NoticeRow,
    "launcher_ended": LauncherEndedRow,
}


@dataclass(frozen=True, slots=True)
class _EventHeader:
    time: float
    event: str
    incarnation: str
    rank: int


@dataclass(frozen=True, slots=True)
class EventLine:
    """One event. `time` is in Unix seconds, by the clock of its writer."""

    time: float
    generation: int
    rank: int  # -1: a launcher
    row: Row


def parse_line(line: bytes) -> EventLine | None:
    """The event in a line; None if a report has no use for it. Raises: MalformedJsonError for what no writer wrote."""
    value = parse_json(line)
    header = as_record(value, _EventHeader)
    kind = KINDS.get(header.event)
    if kind is None:
        return None
    match = _NAME.fullmatch(header.incarnation)
    if match is None or not header.time > 0:
        raise MalformedJsonError("must have the name of a generation and a time, but has not")
    return EventLine(header.time, int(match[1]), header.rank, as_record(value, kind))


def launcher_of(key: str) -> str:
    """The unique name of the launcher that wrote the object `key`; empty if none did, or if it holds several journals."""
    match = _LAUNCHER.fullmatch(key.rpartition("/")[2])
    return match[1] if match is not None else ""
