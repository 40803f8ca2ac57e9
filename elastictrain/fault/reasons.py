"""Why workers end: what an exception means for the run, and the files in which workers leave that for the launcher.

torchrun swallows exit codes.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.errors import EXIT_BUG, EXIT_TRANSPORT, ElasticTrainError, TransportError

logger = logging.getLogger(__name__)

NO_RANK = -1

JOB_NAME = "job.json"  # the job's notes on its run, beside the folders of its generations
_BEGUN_NAME = "begun.json"
_STRAGGLER_NAME = "straggler.json"

_TRANSPORT_CLASSES = frozenset(("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "DistQueueEmptyError"))
_TRANSPORT_WORDS = (
    "gloo",
    "nccl",
    "rccl",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "heartbeat monitor",
    "application timeout caused pair closure",
    "tcpstore",
)
_GLOO_TRANSPORT = re.compile(
    r"\[\S*gloo/(transport|rendezvous)/\S*:\d+\]"
)  # "[PATH:LINE]": where gloo found a connection broken

T = TypeVar("T")

TURN_S = 10.0  # how long other workers of a host leave the report to the first one


def elect_reporter(
    local_rank: int,
    *,
    ending: Callable[[], bool],
    limit_s: float = TURN_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this worker must report; `ending` returns whether it was asked to end.

    torchrun ends all workers as soon as one has left. If another worker had the same finding first and left silently, the first
    one would be ended before it could report it: the others therefore wait to be ended. A worker that waits in vain is alone
    with its finding, and reports it.
    """
    if local_rank == 0:
        return True
    deadline = clock() + limit_s
    while clock() < deadline:
        if ending():
            return False
        sleep(0.05)
    return True


@dataclass(frozen=True, slots=True)
class Reason:
    rank: int  # `NO_RANK` for the process that workers are forked from
    exit_code: int
    phase: str
    step: int  # the current one, 0 before the first; after a stop the newest that is safe, 0 if none is
    sentence: str
    guilty: bool = False  # whether it hung while others waited for it
    missing: tuple[int, ...] = ()  # ranks that did not join in time when the group was formed


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that holds up the others, and how."""

    rank: int
    sentence: str


@dataclass(frozen=True, slots=True)
class _JobNote:
    """The job's note on the newest step that its workers on this host knew to be committed."""

    step: int


def leave_reason(folder: str, reason: Reason, *, only_if_none: bool = False) -> None:
    """Never raises, because it is the last act of a process. `only_if_none`: a reason that the rank left itself is kept."""
    leave_text(Path(folder) / f"rank-{reason.rank:05d}.json", encode_record(reason).decode(), only_if_none=only_if_none)


def leave_begun(folder: str, *, resumed_step: int) -> None:
    """Record that the first step is done; `resumed_step` is the one whose state was restored. Never raises."""
    leave_text(Path(folder) / _BEGUN_NAME, str(resumed_step))


def read_begun(folder: str) -> int | None:
    """The step whose state the generation restored; None if its first step was not done."""
    return _read(Path(folder) / _BEGUN_NAME, int)


def leave_straggler(folder: str, slow: SlowRank | None) -> None:
    """Ask the launcher to leave its host out, which holds up the others; None: not any more. Never raises."""
    leave_text(Path(folder) / _STRAGGLER_NAME, encode_record(slow).decode())


def read_straggler(folder: Path) -> SlowRank | None:
    """For which rank the workers ask to leave this host out; None if they do not."""
    return _read(folder / _STRAGGLER_NAME, SlowRank)


def read_noted_step(folder: str) -> int:
    """The newest step that the job's workers on this host knew to be committed; 0 if none. `folder` is the launcher's own."""
    note = _read(Path(folder) / JOB_NAME, _JobNote)
    return note.step if note is not None else 0


def read_reasons(folder: str) -> list[Reason]:
    """The reasons of one generation's workers, in order of rank; unreadable ones are skipped."""
    found = (_read(path, Reason) for path in sorted(Path(folder).glob("rank-*.json")))
    return [reason for reason in found if reason is not None]


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return parse_record(path.read_bytes(), kind)
    except (OSError, ValueError):
        return None


def leave_text(path: Path, text: str, *, only_if_none: bool = False) -> None:
    """Replace a file atomically. Never raises."""
    # The watchdog's thread and the main thread may write at the same time.
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text)
        if only_if_none:
            # A link, because it never replaces a file that another process has left meanwhile.
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        else:
            temporary.replace(path)
    except OSError as error:
        logger.warning("cannot report to the launcher: %s", error)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ExitClassification:
    exit_code: int
    sentence: str
    show_stack: bool
    alone: bool = False  # whether only this rank has the trouble: the others do not find it, and wait for this rank
    missing: tuple[int, ...] = ()


def classify_exit(
    error: BaseException, *, where: str, in_collective: bool, last_heard: Mapping[str, str], in_own_loop: bool = False
) -> ExitClassification:
    """Classify an exception that ends a worker. `last_heard`: where each other rank was, and how long ago. `in_own_loop`: a
    user's loop runs, whose own connections may fail, too: what torch.distributed and gloo's transport do not raise is a bug."""
    if isinstance(error, ElasticTrainError) and not isinstance(error, TransportError):
        # All ranks find an error with a class of its own, or it ends the run for good; a data worker's death does neither.
        alone = type(error) is ElasticTrainError or getattr(error, "position", None) is not None
        return ExitClassification(error.exit_code, str(error), show_stack=False, alone=alone)
    if isinstance(error, TransportError) or (in_collective and _is_transport(error, in_own_loop=in_own_loop)):
        sentence = f"a collective failed in {where}: {_first_line(error)}{describe_heard(last_heard)}"
        missing = error.missing if isinstance(error, TransportError) else ()
        return ExitClassification(EXIT_TRANSPORT, sentence, show_stack=False, alone=True, missing=missing)
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ())[:1])
    sentence = f"{type(error).__name__} in {where}: {_first_line(error)}{notes}"
    return ExitClassification(EXIT_BUG, sentence, show_stack=True, alone=True)


def describe_heard(last_heard: Mapping[str, str]) -> str:
    """The last heartbeats of the other ranks, as lines that continue a sentence; empty if there are none."""
    lines = "".join(f"\n  {name}: {where}" for name, where in last_heard.items())
    return f"\nlast heard of the other ranks:{lines}" if lines else ""


def _is_transport(error: BaseException, *, in_own_loop: bool) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if type(seen).__name__ in _TRANSPORT_CLASSES:
            return True
        if isinstance(seen, RuntimeError) and _GLOO_TRANSPORT.search(text):
            return True
        if isinstance(seen, RuntimeError) and not in_own_loop and any(word in text.lower() for word in _TRANSPORT_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
