"""From the failures that DCP gathered from all ranks to the one error that all of them raise. Pure."""

from collections.abc import Mapping

from elastictrain.checkpoint.exchange import describe, revive
from elastictrain.errors import CheckpointError, ElasticTrainError, StorageError


def save_error(failures: Mapping[int, BaseException], *, url: str) -> ElasticTrainError:
    """A StorageError of the first rank's kind if only the store failed; else a CheckpointError."""
    lines = []
    for rank in sorted(failures):
        message = str(describe(failures[rank])["message"])
        lines.append(message if len(failures) == 1 else f"rank {rank}: {message}")
    message = f"{url} could not be saved: " + "; ".join(dict.fromkeys(lines))
    first = failures[min(failures)]
    only_store = all(isinstance(error, StorageError) for error in failures.values())
    kind = describe(first)["type"] if only_store else CheckpointError.__name__
    return revive({"type": kind, "message": message})
