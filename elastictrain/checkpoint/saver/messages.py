"""Messages between workers and their saver: one JSON object per line over a Unix socket; `op` names its kind."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from elastictrain.bounded_json import MalformedJsonError, encode_record
from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.manifest import Count
from elastictrain.checkpoint.memory.slot import SnapshotId
from elastictrain.checkpoint.peers.placement import Peer, check_roster


class MalformedError(MalformedJsonError):
    """A message breaks the protocol; the connection is closed."""


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of this host in one incarnation."""

    incarnation: str
    world_size: int
    ranks: tuple[int, ...]
    from_worker: bool = True  # False if derived from snapshots in memory, because no worker has connected


class _Message(msgspec.Struct, frozen=True, tag_field="op", tag=""):
    pass


class WorkerHello(_Message, frozen=True, tag="hello"):
    rank: Count
    ranks: tuple[Count, ...]
    world_size: Count
    incarnation: str
    agent: Count  # the process that would restart the worker
    address: str  # where other hosts reach this one; empty if there are none
    port: Count = 0  # of the previous saver, to be used again; 0: any
    key: str = ""  # proof of the key that signs checkpoints

    def __post_init__(self) -> None:
        if self.rank not in self.ranks or max(self.ranks) >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} is not among {self.ranks}")

    @property
    def host_ranks(self) -> HostRanks:
        return HostRanks(self.incarnation, self.world_size, tuple(sorted(self.ranks)))


class SnapshotTaken(_Message, frozen=True, tag="snapshot"):
    """A snapshot is whole, or was abandoned."""

    slot: Count
    step: Count
    durable: bool = False


class SaverRoster(_Message, frozen=True, tag="roster"):
    hosts: tuple[Peer, ...]
    own: Count  # number of this host's saver among them
    token: str  # in hexadecimal; the savers admit only peers that have it

    def __post_init__(self) -> None:
        check_roster(self.hosts)
        if not bytes.fromhex(self.token) or self.own not in [peer.number for peer in self.hosts]:
            raise ValueError("a roster must have a token, and this host in it")

    @property
    def own_peer(self) -> Peer:
        return next(peer for peer in self.hosts if peer.number == self.own)


class SendReplicas(_Message, frozen=True, tag="send"):
    """Send the snapshots of a step to the other host; None: stop. `unpaced`: without a speed limit. `safe`: of which all
    replicas are there, and stay."""

    step: Count | None
    unpaced: bool = False
    safe: SnapshotId | None = None


class StepTook(_Message, frozen=True, tag="step"):
    micros: Count


class OldSlots(_Message, frozen=True, tag="old"):
    """Bit mask of the slots that this worker still needs."""

    slots: Count


class RunFinished(_Message, frozen=True, tag="finish"):
    """The run is complete."""


class Goodbye(_Message, frozen=True, tag="bye"):
    """This worker ends on purpose."""


class FlushRequest(_Message, frozen=True, tag="flush"):
    """From a launcher that starts no workers again: write what only host memory has."""


class SaverWelcome(_Message, frozen=True, tag="welcome"):
    """Answer to hello; `port`: where other hosts reach the saver, 0: nowhere."""

    pid: Count
    port: Count


class RosterKnown(_Message, frozen=True, tag="met"):
    """Answer to a roster."""


class SnapshotSeen(_Message, frozen=True, tag="seen"):
    """The saver holds the snapshot, or has found that it is unusable."""

    slot: Count
    step: Count


class SlotsReleased(_Message, frozen=True, tag="released"):
    """The saver has released the slots of a step. `done`: it sends nothing else about the step."""

    step: Count
    done: bool = False


class RankLost(_Message, frozen=True, tag="lost"):
    """A rank of this host has ended without a goodbye."""

    rank: Count


class WorkerRefused(_Message, frozen=True, tag="refused"):
    """The saver closes this connection; the worker must not reconnect."""

    reason: str


class Saved(_Message, frozen=True, tag="saved"):
    """A checkpoint that this host's saver has committed."""

    step: Count
    checkpoint: str
    bytes: Count


class SaveFailure(_Message, frozen=True, tag="failed"):
    step: Count
    error: str


class ReplicasSent(_Message, frozen=True, tag="sent"):
    """Sending the snapshots of a step has ended; `whole`: all have arrived."""

    step: Count
    whole: bool


class SlowSave(_Message, frozen=True, tag="slow"):
    """A save is slow; `trouble`: the last warning of storage."""

    step: Count
    seconds: Count
    trouble: str = ""


class Flushed(_Message, frozen=True, tag="flushed"):
    """Answer to a flush request: nothing is left to write, or can be written now."""


ToSaver: TypeAlias = (
    WorkerHello | SnapshotTaken | SaverRoster | SendReplicas | StepTook | OldSlots | RunFinished | Goodbye | FlushRequest
)
ToWorker: TypeAlias = (
    SaverWelcome
    | RosterKnown
    | SnapshotSeen
    | SlotsReleased
    | RankLost
    | WorkerRefused
    | Saved
    | SaveFailure
    | ReplicasSent
    | SlowSave
    | Flushed
)


def encode(message: ToSaver | ToWorker) -> bytes:
    return encode_record(message) + b"\n"


def is_past(incarnation: str, *, present: str, left: Collection[str], connected: bool) -> bool:
    """Whether a worker of `incarnation` comes too late; `present` is the incarnation at work.

    Two lives have the same number if the first ended before a trace of it was stored. Then the later arrival is the younger
    one, unless it was `left` before, or workers of the present one are still `connected`.
    """
    its, ours = number_of(incarnation), number_of(present)
    return incarnation != present and (incarnation in left or its < ours or (its == ours and connected))
