"""What workers leave in files for the launcher: where they went on from, and why they ended. torchrun swallows exit codes."""

import json
import logging
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

logger = logging.getLogger(__name__)

_BEGUN_NAME = "begun.json"


@dataclass(frozen=True, slots=True)
class Reason:
    """How one worker ended."""

    rank: int
    exit_code: int
    phase: str
    step: int
    """The step that it was in; 0 before the first."""

    sentence: str

    guilty: bool = False
    """Whether it hung, and others waited for it."""


def leave_reason(folder: str, reason: Reason) -> None:
    """Never raises: it is the last thing that a process does."""
    _leave(Path(folder) / f"rank-{reason.rank:05d}.json", json.dumps(asdict(reason)))


def leave_begun(folder: str, *, resumed_step: int) -> None:
    """The first step is through; `resumed_step` is the one whose state was taken up. Never raises."""
    _leave(Path(folder) / _BEGUN_NAME, json.dumps(resumed_step))


def read_begun(folder: str) -> int | None:
    """The step whose state the generation took up; None if its first step was not through."""
    try:
        step = json.loads((Path(folder) / _BEGUN_NAME).read_text())
    except (OSError, ValueError):
        return None
    return step if type(step) is int else None


def read_reasons(folder: str) -> list[Reason]:
    """What the workers of one generation left, in order of rank; what cannot be read is left out."""
    found = []
    for path in sorted(Path(folder).glob("rank-*.json")):
        try:
            values = json.loads(path.read_text())
            reason = Reason(**{field.name: values[field.name] for field in fields(Reason)})
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if all(type(getattr(reason, field.name)) is field.type for field in fields(Reason)):
            found.append(reason)
    return found


def _leave(path: Path, text: str) -> None:
    try:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        logger.warning("the launcher cannot be told: %s", error)
