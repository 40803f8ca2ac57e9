"""What hosts write down about themselves and about generations, as plain JSON in storage; and what a host decides to do next.

A *generation* is one attempt of an ordered set of hosts to train together. Generations are numbered from 1 without gaps; the
one with the largest number is the current one, and each is created once, atomically, by whichever host comes first.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import TypeVar

import msgspec

from elastictrain.bounded_json import MalformedJsonError, as_record, parse_json
from elastictrain.lease.chain import LAUNCHER


class HostState(StrEnum):
    """What a host says of itself."""

    READY = "ready"  # nothing runs on it: it can take part in the next generation
    BUSY = "busy"  # its workers run, or are being stopped
    UNFIT = "unfit"  # it failed a check, and cannot take part until it passes
    GONE = "gone"  # it has left in an orderly way, and is not waited for


class EndKind(StrEnum):
    """Why a generation ended, in the eyes of one of its hosts."""

    DONE = "done"  # every worker of the host has reached the last step
    LEAVING = "leaving"  # this host was asked to leave; the others may go on
    GROW = "grow"  # more hosts are there: stopped in order to start again with them
    FAILED = "failed"  # a worker of the host failed; `exit_code` says how
    LOST = "lost"  # another host, `lost`, is silent


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended for one host. The host's record carries it until the next one ends."""

    generation: int
    host: str
    kind: EndKind
    exit_code: int  # the sysexits code of the host's workers that explains most; 0 where they ended well
    phase: str  # where the worker was that failed first; empty if unknown
    step: int
    committed_step: int
    """The newest step that a committed checkpoint held, as this host knows; 0 if none, or where its workers still run: its
    record tells it later."""

    reason: str
    lost: str = ""  # the host that is silent, where `kind` is LOST
    blames: tuple[str, ...] = ()
    """The hosts that its workers or its launcher hold to be the cause of a hang or of a broken connection."""

    @property
    def loses_state(self) -> bool:
        """Whether workers of other hosts hang in a collective that this one has left, and can only be killed."""
        return self.kind in (EndKind.FAILED, EndKind.LOST)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A host's own record in the registry.

    `beat` grows with each writing: whoever sees it change knows that the host lives, whatever the clocks say.
    """

    host: str  # name and boot of one launcher process, unique: a launcher that is started again is another host
    name: str  # the host's name, for people; two hosts may have the same
    address: str
    watch_port: int  # UDP port at which its launcher receives heartbeats
    master_port: int  # a port that was free for the workers' store when this was written
    processes: int
    order: int  # place among hosts that the cluster numbers; -1 where it does not
    state: HostState
    reason: str  # why it is unfit or gone
    beat: int
    ended: int  # The newest generation whose end this host has finished with: nothing of it runs here any more. 0 for none.
    committed_step: int = 0  # the newest step that this host knew to be committed when it had finished with `ended`; 0 if none
    hears: tuple[str, ...] = ()
    """Hosts whose heartbeats this host receives, in order; in a group each must receive those of each."""

    writers: tuple[str, ...] = ()
    """The launcher's process, told apart from every other one: on its own host it is known to be dead at once."""

    end: End | None = None
    """How the newest generation that has ended for this host ended; as long as `ended` is smaller, workers may still run."""


@dataclass(frozen=True, slots=True)
class GenerationFailure:
    """A generation that failed, as the following ones remember it."""

    generation: int
    hosts: tuple[str, ...]  # the hosts that are to blame; empty where none is
    exit_code: int
    phase: str
    step: int
    committed_step: int
    reason: str


class GenerationOutcome(StrEnum):
    """What a generation is for."""

    RUN = "run"
    DONE = "done"
    GIVE_UP = "give up"  # it failed for good, with `exit_code` and `reason`
    ELSEWHERE = "elsewhere"  # not a launcher's: a torchrun, or one process alone, trains or has trained in the folder


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
    proposer: str
    failures: tuple[GenerationFailure, ...]  # failures since the last progress, oldest first: what the restart policy goes by
    excluded: tuple[str, ...]  # hosts that were found unfit and are left out until they say that they are ready again
    pause_s: float
    exit_code: int
    reason: str
    owner: str = LAUNCHER  # who trains in it; empty in records that are older than owners

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

    def first_rank(self, host: str) -> int:
        """Of a member's workers."""
        return sum(member.processes for member in takewhile(lambda member: member.host != host, self.members))

    def host_of(self, rank: int) -> str:
        """The member that has this rank; the last one where there is no such rank."""
        first = (member.host for member in self.members if rank < self.first_rank(member.host) + member.processes)
        return next(first, self.members[-1].host)


DRAFT = Generation(0, GenerationOutcome.RUN, (), 0, "", (), (), 0.0, 0, "")
"""One that nobody has proposed yet, without number and members."""

T = TypeVar("T", HostRecord, End, Generation)


def decode(kind: type[T], data: bytes | str) -> T | None:
    """The record in `data`, or None if that is none: torn, garbled, or of a later release."""
    try:
        return known_record(kind, parse_json(data))
    except MalformedJsonError:
        return None


def known_record(kind: type[T], value: object) -> T | None:
    """The same of what was parsed before. A later release may mean something by a key that is unknown here."""
    try:
        record = as_record({"owner": "", **value} if kind is Generation and isinstance(value, dict) else value, kind)
    except MalformedJsonError:
        return None
    return record if _has_only(value, msgspec.to_builtins(record)) else None


def _has_only(value: object, known: object) -> bool:
    """Whether no object in `value` has a key that the one at the same place in `known` lacks."""
    match value, known:
        case dict(), dict():
            return value.keys() <= known.keys() and all(_has_only(one, known[key]) for key, one in value.items())
        case list(), list() | tuple():
            return all(map(_has_only, value, known))
    return True


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done for now. `for_what` completes "waiting for ..." and is empty where nobody needs to know."""

    for_what: str = ""
    until_s: float | None = None  # when this wait ends at the latest; None if nothing ends it but what it waits for


@dataclass(frozen=True, slots=True)
class Join:
    """Take part in this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Create:
    """Try to make this the next generation; another host may be faster."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Finish:
    """End what runs here. An `end` of this host is told to the others at once, one of another host is only followed."""

    end: End
    at_once: bool
    """Whether nothing can be saved any more: workers are not asked, and an orderly end that is under way is cut short."""


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """This host is left out for a while: say UNFIT, with `ended` of at least this generation, and check again later."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End this launcher."""

    exit_code: int
    reason: str


Decision = Wait | Join | Create | Finish | LeaveOut | Leave
