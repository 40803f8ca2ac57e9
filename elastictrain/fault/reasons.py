"""Why workers end: what an exception means for the run, and who reports it. torchrun swallows exit codes."""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastictrain.bounded_json import parse_record
from elastictrain.errors import EXIT_BUG, EXIT_TRANSPORT, ElasticTrainError, TransportError

logger = logging.getLogger(__name__)

NO_RANK = -1

JOB_NAME = "job.json"  # the job's notes on its run, in the launcher's folder

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


class Reason(msgspec.Struct, tag="reason", frozen=True):
    """Why a worker ends, or takes no part in its generation any more; from the worker to its launcher."""

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


def read_noted_step(folder: str) -> int:
    """The newest step that the job's workers on this host knew to be committed; 0 if none. `folder` is the launcher's own."""
    try:
        return parse_record((Path(folder) / JOB_NAME).read_bytes(), _JobNote).step
    except (OSError, ValueError):
        return 0


def leave_text(path: Path, text: str) -> None:
    """Replace a file atomically. Never raises."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        # Cleaners delete old temporary folders, and a run may last for weeks.
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        logger.warning("cannot note for the launcher: %s", error)


@dataclass(frozen=True, slots=True)
class ExitClassification:
    exit_code: int
    sentence: str
    show_stack: bool
    alone: bool = False  # whether only this rank has the trouble: the others do not find it, and wait for this rank
    missing: tuple[int, ...] = ()
    guilty: bool = False  # as in `Reason`


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
