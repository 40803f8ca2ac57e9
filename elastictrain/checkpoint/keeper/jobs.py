"""What a saver is asked to do."""

from dataclasses import dataclass
from enum import StrEnum

from elastictrain.checkpoint.keeper.patience import Patience
from elastictrain.checkpoint.keeper.pins import Pinned
from elastictrain.errors import ElasticTrainError, StorageError, StorageFullError, TransientStorageError


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One step of this host's ranks that is to become durable."""

    snapshots: tuple[Pinned, ...]
    leader: bool
    """Whether this host commits."""

    reason: str
    patience: Patience
    """With other hosts."""

    @property
    def incarnation(self) -> str:
        """Of the ranks that took the snapshots."""
        return self.snapshots[0].facts.incarnation

    @property
    def step(self) -> int:
        """Of the snapshots."""
        return self.snapshots[0].facts.step

    @property
    def world_size(self) -> int:
        """Of the group that took them."""
        return self.snapshots[0].facts.world_size

    @property
    def first_rank(self) -> int:
        """Names this host among the others."""
        return min(pinned.facts.rank for pinned in self.snapshots)

    @property
    def alone(self) -> bool:
        """Whether all ranks are on this host."""
        return len(self.snapshots) == self.world_size


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """One step that this host cannot take part in saving; the leader is told once it has begun."""

    incarnation: str
    step: int
    first_rank: int
    reason: str
    patience: Patience


class Cause(StrEnum):
    """Why a step could not be saved, as far as it tells what to do with the snapshots."""

    PASSING = "passing"
    """May pass while nobody trains: a store comes back, somebody makes room."""

    REFUSED = "refused"
    """Storage does not take it, until a person mends that."""

    OTHER = "other"
    """The snapshots are of no use, or other hosts lack their part."""


def cause_of(error: BaseException) -> Cause:
    """Pure."""
    if isinstance(error, TransientStorageError | StorageFullError):
        return Cause.PASSING
    known = isinstance(error, ElasticTrainError) and not isinstance(error, StorageError)
    return Cause.OTHER if known else Cause.REFUSED
