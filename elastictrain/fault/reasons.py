"""What workers leave in files for the launcher: where they went on from, and why they ended. torchrun swallows exit codes."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from elastictrain.bounded_json import parse_json

TURN_S = 10.0
"""How long the first worker of a host is left the word."""


def elect_reporter(
    local_rank: int,
    *,
    ending: Callable[[], bool],
    limit_s: float = TURN_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this worker has to say it; `ending` tells whether it was asked to end.

    torchrun ends all workers as soon as one has left. If another than the first came first to the same finding and left in
    silence, the first would be ended before it could say anything: the others therefore wait to be ended. One that waits in
    vain is alone with its finding, and speaks.
    """
    if local_rank == 0:
        return True
    deadline = clock() + limit_s
    while clock() < deadline:
        if ending():
            return False
        sleep(0.05)
    return True


logger = logging.getLogger(__name__)

JOB_NAME = "job.json"
"""What a job remembers of its run, beside the folders of its generations."""

_BEGUN_NAME = "begun.json"


@dataclass(frozen=True, slots=True)
class Reason:
    """How one worker ended."""

    rank: int
    exit_code: int
    phase: str
    step: int
    """The step that it was in, 0 before the first; of one that was stopped, the newest that is safe, 0 if none is."""

    sentence: str

    guilty: bool = False
    """Whether it hung, and others waited for it."""


def leave_reason(folder: str, reason: Reason, *, only_if_none: bool = False) -> None:
    """Never raises: it is the last thing that a process does. `only_if_none`: what the rank has left itself is kept."""
    _leave(Path(folder) / f"rank-{reason.rank:05d}.json", json.dumps(asdict(reason)), only_if_none=only_if_none)


def leave_begun(folder: str, *, resumed_step: int) -> None:
    """The first step is through; `resumed_step` is the one whose state was taken up. Never raises."""
    _leave(Path(folder) / _BEGUN_NAME, json.dumps(resumed_step), only_if_none=False)


def read_begun(folder: str) -> int | None:
    """The step whose state the generation took up; None if its first step was not through."""
    try:
        step = parse_json((Path(folder) / _BEGUN_NAME).read_text())
    except (OSError, ValueError):
        return None
    return step if type(step) is int else None


def read_noted_step(folder: str) -> int:
    """The newest step that the job's workers on this host knew to be committed; 0 if none. `folder` is the launcher's own."""
    try:
        step = parse_json((Path(folder) / JOB_NAME).read_text())["step"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return step if type(step) is int else 0


def read_reasons(folder: str) -> list[Reason]:
    """What the workers of one generation left, in order of rank; what cannot be read is left out."""
    found = []
    for path in sorted(Path(folder).glob("rank-*.json")):
        try:
            values = parse_json(path.read_text())
            reason = Reason(**{field.name: values[field.name] for field in fields(Reason)})
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if all(type(getattr(reason, field.name)) is field.type for field in fields(Reason)):
            found.append(reason)
    return found


def leave_text(path: Path, text: str) -> None:
    """Replace a file as a whole. Never raises."""
    _leave(path, text, only_if_none=False)


def _leave(path: Path, text: str, *, only_if_none: bool) -> None:
    # A thread that finds this process overdue may leave its word while the main thread leaves another.
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text)
        if only_if_none:
            # A link, since it never takes the place of what somebody else has left in the meantime.
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        else:
            temporary.replace(path)
    except OSError as error:
        logger.warning("the launcher cannot be told: %s", error)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
