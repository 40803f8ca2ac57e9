"""When a keeper ends. Pure."""

from dataclasses import dataclass
from typing import Literal

ALONE_S = 60.0
"""How long a keeper stays that nobody has ever spoken to: the worker that started it may have died at once."""

KEPT_S = 12 * 3600.0
"""How long snapshots that storage refuses stay in host memory once all workers are gone: a person may need a night."""

Decision = Literal["stay", "flush", "keep", "leave"]


@dataclass(frozen=True, slots=True)
class Life:
    """What a keeper knows of those it keeps for."""

    workers: int
    """Connected now."""

    agents: int
    """Alive now: processes that would start workers again (or, without torchrun, the workers themselves)."""

    ever: bool
    """Whether a worker was ever connected."""

    age_s: float
    saving: bool
    """Whether something is being written."""

    finished: bool
    """Whether the run said that it is complete."""

    flushed: bool
    """Whether what was only in memory has been written, or cannot be now."""

    unsaved: bool = False
    """Whether storage refused it, and it is to be kept a while longer."""

    asked: bool = False
    """Whether a launcher that starts nobody again waits for what is only in memory to be written."""


def decide(life: Life) -> Decision:
    """A keeper stays as long as anybody may come back, and leaves nothing unwritten."""
    if life.saving:
        return "stay"
    if life.finished and not life.workers:
        return "leave"
    if life.workers:
        return "stay"
    if not life.asked and (life.agents or (not life.ever and life.age_s < ALONE_S)):
        return "stay"
    if not life.flushed:
        return "flush"
    if life.unsaved:
        return "keep"
    return "stay" if life.asked else "leave"
