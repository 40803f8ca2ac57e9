"""`ls`: what checkpoints there are, and which one a start would take."""

import time
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.commands.location import locate
from elastictrain.checkpoint.commands.rows import FindSnapshots, Row, merge, resume_choice
from elastictrain.checkpoint.commands.speaking import result, result_json
from elastictrain.checkpoint.commands.survey import list_folders, survey
from elastictrain.checkpoint.commands.texts import age_text, size_text, table
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.errors import EXIT_OK, NoValidCheckpointError

_HEADER = ("", "name", "step", "age", "size", "world", "files", "tier", "state")
_FIGURES = ("step", "age", "size", "world", "files")


def list_checkpoints(
    url: str, *, as_json: bool, find_snapshots: FindSnapshots, clock: Callable[[], float] = time.time, key_env: str = ""
) -> int:
    """Shows the checkpoints at `url`; returns the exit code.

    Raises: NoValidCheckpointError if `url` names a checkpoint that is not there; ObjectNotFoundError; StorageError.
    """
    location = locate(url, key_env=key_env)
    stored = survey(location, list_folders(location))
    every = merge([one.row for one in stored], find_snapshots(location.run.url))
    chosen = resume_choice(every)
    rows = [row for row in every if location.folder in (None, row.name)]
    if not rows and location.folder is not None:
        raise NoValidCheckpointError(f"{location.url} must hold {location.folder}, but does not")
    if as_json:
        found: list[JsonValue] = [_document(row, resume=row is chosen) for row in rows]
        result_json({"url": location.url, "checkpoints": found})
    else:
        result(_text(rows, chosen=chosen, url=location.url, now=clock()))
    return EXIT_OK


def _document(row: Row, *, resume: bool) -> JsonValue:
    return {
        "name": row.name,
        "step": row.step,
        "tier": row.tier,
        "state": row.state.value,
        "reason": row.reason,
        "created": row.created,
        "modified": row.modified,
        "bytes": row.size_bytes,
        "world_size": row.world_size,
        "files": row.num_files,
        "signed": row.signed,
        "resume": resume,
    }


def _text(rows: Sequence[Row], *, chosen: Row | None, url: str, now: float) -> str:
    if not rows:
        return f"{url}\n  no checkpoint yet"
    lines = [
        (
            ">" if row is chosen else "",
            row.name,
            str(row.step),
            age_text(now - (row.modified if row.created is None else row.created)),
            size_text(row.size_bytes),
            "-" if row.world_size is None else str(row.world_size),
            str(row.num_files),
            row.tier,
            _state_text(row),
        )
        for row in rows
    ]
    legend = ""
    if any(row is chosen for row in rows):
        legend = "\n> a start resumes from this one, if its bytes have their digests"
    elif chosen is None:
        legend = "\nnone of these is one that a start can resume from"
    return f"{url}\n{table(_HEADER, lines, right=_FIGURES, indent='')}{legend}"


def _state_text(row: Row) -> str:
    signed = ", signed" if row.signed else ""
    return f"{row.state.value}{signed}: {row.reason}" if row.reason else f"{row.state.value}{signed}"
