"""The events that a report is made of, as they are read: torn, garbled and unknown lines are left out, and counted."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from elastictrain.bounded_json import MalformedJsonError, as_record, parse_json

_NAME = re.compile(r"(?:generation-)?(\d{1,9})(?:-\w+)?")
_LAUNCHER = re.compile(r"launcher-(.+?)(?:\.part-\d+)?\.jsonl")


class EventRow(msgspec.Struct, frozen=True):
    """What a report needs of an event; the tag of each kind is its name in the journal."""


class StartRow(EventRow, frozen=True, tag="start"):
    world_size: int
    hosts: Sequence[str]
    seconds: Mapping[str, float] = {}


class ResumeRow(EventRow, frozen=True, tag="resume"):
    step: int
    tier: str
    seconds: Mapping[str, float] = {}


class FirstStepRow(EventRow, frozen=True, tag="first_step"):
    seconds: Mapping[str, float]


class RecoveryRow(EventRow, frozen=True, tag="recovery"):
    rung: str
    lost: Sequence[str] = ()


class StepRow(EventRow, frozen=True, tag="step"):
    step: int
    loss: float | None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    positions: tuple[int, int] = (0, 0)
    waits: Mapping[str, float] = {}

    @property
    def samples(self) -> int:
        return self.positions[1] - self.positions[0]

    @property
    def tokens(self) -> float | None:
        """None where the task does not count them."""
        if self.tokens_per_s is None or not self.samples_per_s:
            return None
        return self.samples * self.tokens_per_s / self.samples_per_s


class EvalRow(EventRow, frozen=True, tag="eval"):
    step: int
    loss: float | None
    seconds: float


class SnapshotRow(EventRow, frozen=True, tag="snapshot"):
    step: int
    stall_s: float


class CompiledRow(EventRow, frozen=True, tag="compiled"):
    """The first step was compiled."""


class SavedRow(EventRow, frozen=True, tag="checkpoint_saved"):
    step: int
    reason: str
    bytes: int
    seconds: Mapping[str, float] = {}


class PreflightRow(EventRow, frozen=True, tag="preflight"):
    stage: str
    level: str
    seconds: float
    counts: Mapping[str, int]
    findings: Sequence[Mapping[str, object]] = ()


class FailureRow(EventRow, frozen=True, tag="failure"):
    exit_code: int
    error: str
    phase: str


class HangRow(EventRow, frozen=True, tag="hang"):
    guilty: Sequence[str]
    hosts: Sequence[str]
    reason: str
    text: str = ""


class CollectiveFaultRow(EventRow, frozen=True, tag="collective_fault"):
    kind: str
    group: str
    sequence: int
    culprits: Sequence[str]
    others: Sequence[str]
    calls: Mapping[str, str]
    text: str


class DivergedRow(EventRow, frozen=True, tag="replicas_diverged"):
    ranks: Sequence[int]
    hosts: Sequence[str]


class StopRow(EventRow, frozen=True, tag="stop"):
    reason: str
    exit_code: int


class LauncherStartedRow(EventRow, frozen=True, tag="launcher_started"):
    launcher: str
    processes: int


class GenerationRow(EventRow, frozen=True, tag="generation"):
    hosts: Sequence[str]
    world_size: int


class GenerationEndedRow(EventRow, frozen=True, tag="generation_ended"):
    kind: str
    exit_code: int
    phase: str = ""
    reason: str = ""
    lost: str = ""
    died: Sequence[str] = ()


class NoticeRow(EventRow, frozen=True, tag="notice"):
    """Its launcher lives."""


class LauncherEndedRow(EventRow, frozen=True, tag="launcher_ended"):
    """Its launcher does not live any more."""


KINDS: Mapping[str, type[EventRow]] = {str(kind.__struct_config__.tag): kind for kind in EventRow.__subclasses__()}


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
    row: EventRow


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
