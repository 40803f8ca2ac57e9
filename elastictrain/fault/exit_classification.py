"""What an exception means for the run: an exit code, a sentence for a person, and whether the stack helps."""

from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.errors import EXIT_BUG, EXIT_TRANSPORT, ElasticTrainError, TransportError

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


@dataclass(frozen=True, slots=True)
class ExitClassification:
    """How a process ends because of an exception."""

    exit_code: int
    sentence: str
    show_stack: bool
    alone: bool = False
    """Whether it is this rank's own trouble: the others do not find it too, and wait for this rank."""


def classify_exit(
    error: BaseException, *, where: str, in_collective: bool, last_heard: Mapping[str, str]
) -> ExitClassification:
    """Judge an exception that ends a worker. `last_heard` says for each other rank where it was, and how long ago."""
    if isinstance(error, ElasticTrainError) and not isinstance(error, TransportError):
        # What has a class of its own is found by all ranks alike, or ends a run for good; a data worker's death does not.
        return ExitClassification(error.exit_code, str(error), show_stack=False, alone=type(error) is ElasticTrainError)
    if isinstance(error, TransportError) or (in_collective and _is_transport(error)):
        sentence = f"a collective failed in {where}: {_first_line(error)}{describe_heard(last_heard)}"
        return ExitClassification(EXIT_TRANSPORT, sentence, show_stack=False, alone=True)
    return ExitClassification(EXIT_BUG, f"{type(error).__name__} in {where}: {_first_line(error)}", show_stack=True, alone=True)


def describe_heard(last_heard: Mapping[str, str]) -> str:
    """The last words of the other ranks, as lines that continue a sentence; empty if there are none."""
    lines = "".join(f"\n  {name}: {where}" for name, where in last_heard.items())
    return f"\nlast heard of the other ranks:{lines}" if lines else ""


def _is_transport(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if type(seen).__name__ in _TRANSPORT_CLASSES:
            return True
        if isinstance(seen, RuntimeError) and any(word in text for word in _TRANSPORT_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
