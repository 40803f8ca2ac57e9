"""Records of hosts and generations, as plain JSON in storage; and a host's decisions.

A *generation* is one attempt of an ordered set of hosts to train together. Generations are numbered from 1 without gaps; the
one with the largest number is the current one, and each is created once, atomically, by the first host to propose it.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import TypeVar

import msgspec

from elastictrain.bounded_json import MalformedJsonError, as_record, parse_json
from elastictrain.identity import NOTHING_POISONED, PoisonedSteps
from elastictrain.lease.chain import LAUNCHER


class HostState(StrEnum):
    READY = "ready"  # nothing runs on it: it can take part in the next generation
    BUSY = "busy"  # its workers run, or are being stopped
    UNFIT = "unfit"  # it failed a check, and cannot take part until it passes
    GONE = "gone"  # it has left in an orderly way, and is not waited for


class EndKind(StrEnum):
    """Why a generation ended, as one of its hosts saw it."""

    DONE = "done"  # every worker of the host has reached the last step
    LEAVING = "leaving"  # this host was asked to leave; the others may continue
    GROW = "grow"  # more hosts exist: stopped in order to restart with them
    FAILED = "failed"  # a worker of the host failed, with `exit_code`
    LOST = "lost"  # another host, `lost`, is silent


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended for one host. The host's record carries it until the next one ends."""

    generation: int
    host: str
    kind: EndKind
    exit_code: int  # exit code of the host's workers that explains most; 0 if they ended well
    phase: str  # of the first worker that failed; empty if unknown
    step: int
    committed_step: int  # newest one that this host knows; 0: none, or workers still run (then later records have it)
    reason: str
    lost: str = ""  # the silent host, if `kind` is LOST
    blames: tuple[str, ...] = ()  # hosts that its workers or launcher blame for a hang or a broken connection
    slow_rank: int = -1  # of this host, which leaves because this rank holds up the others; -1: it does not
    restored_step: int = 0  # whose state its workers had restored; 0: none, or unknown

    @property
    def loses_state(self) -> bool:
        """Whether workers of other hosts hang in a collective that this host has left, and can only be killed."""
        return self.kind in (EndKind.FAILED, EndKind.LOST)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A host's own record in the registry. `beat` grows with each write: a change proves that the host lives, on any clock."""

    host: str  # unique name of one launcher process: a restarted launcher is another host
    name: str  # hostname, for people; two hosts may have the same
    address: str
    watch_port: int  # UDP port at which its launcher receives heartbeats
    master_port: int  # a port that was free for the workers' store at the time of writing
    processes: int
    order: int  # number among the hosts that the cluster numbers; -1 if it does not
    state: HostState
    reason: str  # why it is unfit or has left
    beat: int
    ended: int  # newest generation of which nothing runs here any more; 0: none
    committed_step: int = 0  # newest committed step that this host knew when it finished with `ended`; 0: none
    hears: tuple[str, ...] = ()  # hosts whose heartbeats arrive here, in order; in a group each must receive those of each
    writers: tuple[str, ...] = ()  # identity of the launcher's process: on its own host its death is known at once
    end: End | None = None  # how its newest ended generation ended; while `ended` is smaller, workers may still run


@dataclass(frozen=True, slots=True)
class GenerationFailure:
    """A failed generation, as the following ones keep it."""

    generation: int
    hosts: tuple[str, ...]  # to blame; empty if none is
    exit_code: int
    phase: str
    step: int
    committed_step: int
    reason: str


class GenerationOutcome(StrEnum):
    RUN = "run"
    DONE = "done"
    GIVE_UP = "give up"  # it failed for good, with `exit_code` and `reason`
    ELSEWHERE = "elsewhere"  # not a launcher's: a torchrun, or a single process, trains or has trained in the folder


@dataclass(frozen=True, slots=True)
class GenerationMember:
    host: str
    name: str
    address: str
    watch_port: int
    processes: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One attempt. A host in `members` of the newest one takes part, as host number `members.index`."""

    number: int
    outcome: GenerationOutcome
    members: tuple[GenerationMember, ...]
    master_port: int
    proposer: str
    failures: tuple[GenerationFailure, ...]  # since the last progress, oldest first: input of the restart policy
    excluded: tuple[str, ...]  # hosts found unfit, left out until they report that they are ready again
    pause_s: float
    exit_code: int
    reason: str
    owner: str = LAUNCHER  # the kind of run; empty in records older than this field
    slow: End | None = None  # of the last host that was left out because it held up the others
    poisoned: PoisonedSteps = NOTHING_POISONED  # each generation has those of all before it

    @property
    def terminal(self) -> bool:
        """Whether the run is over; the next start of the launchers then begins anew."""
        return self.outcome is not GenerationOutcome.RUN

    @property
    def world_size(self) -> int:
        return sum(member.processes for member in self.members)

    def has(self, host: str) -> bool:
        return any(member.host == host for member in self.members)

    def first_rank(self, host: str) -> int:
        return sum(member.processes for member in takewhile(lambda member: member.host != host, self.members))

    def host_of(self, rank: int) -> str:
        """The member that has this rank; the last member if no such rank exists."""
        first = (member.host for member in self.members if rank < self.first_rank(member.host) + member.processes)
        return next(first, self.members[-1].host)


DRAFT = Generation(0, GenerationOutcome.RUN, (), 0, "", (), (), 0.0, 0, "")
# Without number and members.

T = TypeVar("T", HostRecord, End, Generation)


def decode(kind: type[T], data: bytes | str) -> T | None:
    """Decode a record; None if it is torn, garbled, or of a later release."""
    try:
        return known_record(kind, parse_json(data))
    except MalformedJsonError:
        return None


def known_record(kind: type[T], value: object) -> T | None:
    """As `decode`, of parsed JSON. An unknown key is refused: a later release may give it a meaning."""
    try:
        record = as_record({"owner": "", **value} if kind is Generation and isinstance(value, dict) else value, kind)
    except MalformedJsonError:
        return None
    return record if _has_only(value, msgspec.to_builtins(record)) else None


def _has_only(value: object, known: object) -> bool:
    """Whether no object in `value` has a key that its counterpart in `known` lacks."""
    match value, known:
        case dict(), dict():
            return value.keys() <= known.keys() and all(_has_only(one, known[key]) for key, one in value.items())
        case list(), list() | tuple():
            return all(map(_has_only, value, known))
    return True


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for now. `for_what` completes "waiting for ..."; it is empty if nothing is to be printed."""

    for_what: str = ""
    until_s: float | None = None  # when this wait ends at the latest; None: no limit


@dataclass(frozen=True, slots=True)
class Join:
    generation: Generation


@dataclass(frozen=True, slots=True)
class Create:
    """Try to make this the next generation; another host may be faster."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Finish:
    """End what runs here. An `end` of this host is published at once, one of another host is only followed."""

    end: End
    at_once: bool  # whether nothing can be saved: workers are not asked, and an orderly end that has begun is cut short


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Leave this host out for a while: publish UNFIT, with `ended` of at least this generation, and check again later."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Check this host again at once: it was left out for being slow, and too few others are left."""


@dataclass(frozen=True, slots=True)
class Leave:
    exit_code: int
    reason: str


Decision = Wait | Join | Create | Finish | LeaveOut | Rejoin | Leave
