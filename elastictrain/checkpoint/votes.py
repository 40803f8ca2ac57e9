"""What each rank says about loading one checkpoint, and what follows for all. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastictrain.checkpoint.choose import Reject
from elastictrain.checkpoint.manifest import JsonValue


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's outcome: `loaded`, `damaged` (the checkpoint's fault), or `failed` (the store's, the model's or our own)."""

    outcome: Literal["loaded", "damaged", "failed"]
    bytes_read: int = 0
    file: str | None = None
    """That is damaged, or could not be read."""

    error: str = ""
    message: str = ""

    def to_json(self) -> JsonValue:
        """For `exchange.gather_json`."""
        return [self.outcome, self.bytes_read, self.file, self.error, self.message]


def vote_from_json(value: JsonValue) -> Vote:
    """The inverse of `Vote.to_json`."""
    if not isinstance(value, list) or len(value) != 5:
        raise TypeError(f"a vote must be a list of 5 values, but is {value!r}")
    outcome, bytes_read, file, error, message = value
    return Vote(
        outcome="loaded" if outcome == "loaded" else "damaged" if outcome == "damaged" else "failed",
        bytes_read=bytes_read if isinstance(bytes_read, int) else 0,
        file=file if isinstance(file, str) else None,
        error=str(error),
        message=str(message),
    )


@dataclass(frozen=True, slots=True)
class Accepted:
    """All ranks have loaded it."""

    bytes_read: int


@dataclass(frozen=True, slots=True)
class Failed:
    """At least one rank could not go on, for a reason that condemns no checkpoint."""

    error: str
    message: str
    files: tuple[str, ...] = ()
    """That could not be read, as far as ranks know."""


def judge(votes: Sequence[Vote], *, folder: str) -> Accepted | Reject | Failed:
    """Damage that one rank has proved stands, whatever happened to the others."""
    damaged = [vote for vote in votes if vote.outcome == "damaged"]
    if damaged:
        reasons = list(dict.fromkeys(vote.message for vote in damaged))
        return Reject(folder, damaged[0].file, "; ".join(reasons))
    files = tuple(dict.fromkeys(vote.file for vote in votes if vote.outcome == "failed" and vote.file))
    for rank, vote in enumerate(votes):
        if vote.outcome == "failed":
            return Failed(vote.error, vote.message if len(votes) == 1 else f"rank {rank}: {vote.message}", files)
    return Accepted(sum(vote.bytes_read for vote in votes))
