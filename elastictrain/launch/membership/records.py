"""What hosts write down about themselves and about generations. Frozen, and plain JSON in storage.

A *generation* is one attempt of an ordered set of hosts to train together. Generations are numbered from 1 without gaps; the
one with the largest number is the current one, and each is created once, atomically, by whichever host comes first.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TypeVar, get_type_hints

from elastictrain.bounded_json import parse_json
from elastictrain.lease.records import LAUNCHER


class HostState(StrEnum):
    """What a host says of itself."""

    READY = "ready"
    """Nothing runs on it: it can take part in the next generation."""

    BUSY = "busy"
    """Its torchrun runs, or is being stopped."""

    UNFIT = "unfit"
    """It failed a check, and cannot take part until it passes."""

    GONE = "gone"
    """It has left in an orderly way, and is not waited for."""


class EndKind(StrEnum):
    """Why a generation ended, in the eyes of one of its hosts."""

    DONE = "done"
    """Every worker of the host has reached the last step."""

    LEAVING = "leaving"
    """This host was asked to leave; the others may go on."""

    GROW = "grow"
    """More hosts are there: stopped in order to start again with them."""

    FAILED = "failed"
    """A worker of the host failed; `exit_code` says how."""

    LOST = "lost"
    """Another host, `lost`, is silent."""


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended for one host. The host's record carries it until the next one ends."""

    generation: int
    host: str
    kind: EndKind
    exit_code: int
    """The sysexits code of the host's workers that explains most; 0 where they ended well."""

    phase: str
    """Where the worker was that failed first; empty if unknown."""

    step: int
    """The step in which it was; 0 if none."""

    committed_step: int
    """The newest step that a committed checkpoint held, as this host knows; 0 if none, or where its workers still run: its
    line tells it later."""

    reason: str
    """A sentence for people."""

    lost: str = ""
    """The host that is silent, where `kind` is LOST."""

    blames: tuple[str, ...] = ()
    """The hosts that its workers or its launcher hold to be the cause of a hang or of a broken connection."""


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A host's own record in the registry.

    `beat` grows with each writing: whoever sees it change knows that the host lives, whatever the clocks say.
    """

    host: str
    """Name and boot of one launcher process, unique: a launcher that is started again is another host."""

    name: str
    """The host's name, for people; two hosts may have the same."""

    address: str
    watch_port: int
    """UDP port at which its launcher hears the others."""

    master_port: int
    """A port that was free for torchrun's store when this was written."""

    processes: int
    order: int
    """Place among hosts that the cluster numbers; -1 where it does not."""

    state: HostState
    reason: str
    """Why it is unfit or gone."""

    beat: int
    ended: int
    """The newest generation whose end this host has finished with: nothing of it runs here any more. 0 for none."""

    committed_step: int = 0
    """The newest step that this host knew to be committed when it had finished with `ended`; 0 if none."""

    hears: tuple[str, ...] = ()
    """Hosts whose heartbeats this host receives, in order; in a group each must hear each."""

    writers: tuple[str, ...] = ()
    """The launcher's process, told apart from every other one: on its own host it is known to be dead at once."""

    end: End | None = None
    """How the newest generation that has ended for this host ended; as long as `ended` is smaller, workers may still run."""


@dataclass(frozen=True, slots=True)
class GenerationFailure:
    """A generation that failed, as the following ones remember it."""

    generation: int
    hosts: tuple[str, ...]
    """The hosts that are to blame; empty where none is."""

    exit_code: int
    phase: str
    step: int
    committed_step: int
    reason: str


class GenerationOutcome(StrEnum):
    """What a generation is for."""

    RUN = "run"
    """Its hosts train."""

    DONE = "done"
    """Nothing more is to be done."""

    GIVE_UP = "give up"
    """It failed for good, with `exit_code` and `reason`."""

    ELSEWHERE = "elsewhere"
    """Not a launcher's: a torchrun, or one process alone, trains or has trained in the folder."""


@dataclass(frozen=True, slots=True)
class GenerationMember:
    """A host's part in a generation."""

    host: str
    name: str
    address: str
    watch_port: int
    processes: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One attempt. Whoever finds itself among `members` of the newest one takes part, as host number `members.index`."""

    number: int
    outcome: GenerationOutcome
    members: tuple[GenerationMember, ...]
    master_port: int
    """On the first member."""

    proposer: str
    failures: tuple[GenerationFailure, ...]
    """Failures since the last progress, oldest first: what the restart policy goes by."""

    excluded: tuple[str, ...]
    """Hosts that were found unfit and are left out until they say that they are ready again."""

    pause_s: float
    """How long its hosts wait before they start."""

    exit_code: int
    """0 unless `outcome` is GIVE_UP."""

    reason: str
    """Why it was made, for people."""

    owner: str = LAUNCHER
    """Who trains in it; empty in records that are older than owners."""

    @property
    def terminal(self) -> bool:
        """Whether the run is over; another start of the launchers then begins anew."""
        return self.outcome is not GenerationOutcome.RUN

    @property
    def world_size(self) -> int:
        """Workers of all hosts."""
        return sum(member.processes for member in self.members)

    def has(self, host: str) -> bool:
        """Whether a host is a member."""
        return any(member.host == host for member in self.members)


T = TypeVar("T", bound=HostRecord | End | Generation | GenerationMember | GenerationFailure)

_PARTS: Mapping[str, type[GenerationMember] | type[GenerationFailure]] = {
    "members": GenerationMember,
    "failures": GenerationFailure,
}
"""Fields that hold tuples of records."""

_LATER: Mapping[type, Mapping[str, object]] = {
    HostRecord: {"committed_step": 0, "hears": [], "writers": [], "end": None},
    Generation: {"owner": ""},
}
"""Fields that the records of earlier releases lack."""


def encode(record: HostRecord | Generation) -> bytes:
    """One object of JSON."""
    return json.dumps(asdict(record), sort_keys=True).encode()


def decode(cls: type[T], data: bytes) -> T | None:
    """The record in `data`, or None if that is none: torn, garbled, or of another release."""
    try:
        return _from_json(cls, parse_json(data))
    except (ValueError, OverflowError, RecursionError):
        return None


def _from_json(cls: type[T], value: object) -> T:
    """Raises: ValueError."""
    if isinstance(value, dict):
        value = {**_LATER.get(cls, {}), **value}
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(cls)}:
        raise ValueError(f"no {cls.__name__}")
    hints = get_type_hints(cls)
    make: Callable[..., T] = cls
    return make(**{name: _field(name, hints[name], one) for name, one in value.items()})


def _field(name: str, hint: object, value: object) -> object:
    if name in _PARTS and isinstance(value, list):
        return tuple(_from_json(_PARTS[name], one) for one in value)
    if hint == End | None:
        return None if value is None else _from_json(End, value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(hint, type) and hint is not float and type(value) is hint:
        return value
    raise ValueError(f"{name} cannot be {value!r}")
