"""What `ls` tells of each checkpoint, in storage or in host memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class State(StrEnum):
    """What is known of a checkpoint without reading the bytes of its tensors."""

    VALID = "valid"
    QUARANTINED = "quarantined"
    UNCOMMITTED = "uncommitted"
    DAMAGED = "damaged"
    UNTRUSTED = "untrusted"
    """Not signed with the key that was given."""

    UNKNOWN = "unknown format"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint. `modified` and `created` are unix seconds; `created` and `world_size` are unknown without a manifest."""

    name: str
    step: int
    tier: str
    """`storage`, or where else it is held."""

    state: State
    reason: str
    """Why the state is not `valid`; empty if it is."""

    created: float | None
    modified: float
    size_bytes: int
    world_size: int | None
    num_files: int
    signed: bool | None = None
    """Whether its manifest bears a signature; unknown without a manifest."""


class FindSnapshots(Protocol):
    """Looks for snapshots of a run that this machine holds outside of storage."""

    def __call__(self, run_url: str, /) -> Sequence[Row]:
        """One row for each; `run_url` is the run's folder, as the person wrote it."""


def merge(stored: Sequence[Row], snapshots: Sequence[Row]) -> tuple[Row, ...]:
    """Newest first; at the same step a snapshot before what is stored. Each of the two keeps its own order within a step."""
    return tuple(sorted([*snapshots, *stored], key=lambda row: -row.step))


def resume_choice(rows: Sequence[Row]) -> Row | None:
    """The row, of all of a run's, newest first, that a start tries first; None if it would not resume."""
    for row in rows:
        if row.state is State.UNKNOWN:
            # A start stops here rather than to lose what it cannot read.
            return None
        if row.state is State.VALID:
            return row
    return None
