"""A file in which whoever stops a worker tells it why and until when: a signal carries neither."""

import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

from elastictrain.bounded_json import parse_json

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StopNote:
    """Why to stop, and the unix second by which to be gone; None: nobody says."""

    reason: str
    deadline: float | None


def parse_stop_note(data: bytes) -> StopNote:
    """Raises: ValueError that says what the note must be and is not."""
    try:
        facts = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be JSON, but is {data[:40]!r}") from error
    reason = facts.get("reason") if isinstance(facts, dict) else None
    if not isinstance(reason, str) or not reason:
        raise ValueError("it must be an object with the text `reason`")
    deadline = facts.get("deadline")
    if deadline is None:
        return StopNote(reason, None)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not math.isfinite(deadline):
        raise ValueError(f"`deadline` must be unix seconds or null, but is {deadline!r}")
    return StopNote(reason, float(deadline))


def write_stop_note(path: str, note: StopNote) -> None:
    """Whoever reads it finds all of it, or what was there before. Raises: OSError."""
    temporary = f"{path}.{os.getpid()}"
    Path(temporary).write_text(json.dumps({"reason": note.reason, "deadline": note.deadline}))
    Path(temporary).replace(path)


def read_stop_note(path: str | None) -> StopNote | None:
    """What the file says; None if there is none, or nothing in it that can be understood, which is logged."""
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            return parse_stop_note(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError) as error:
        logger.warning("the reason to stop cannot be read from %s: %s", path, error)
        return None
