"""`ls`: what checkpoints there are, and which one a start would take."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.commands.output import age_text, result, result_json, size_text, table
from elastictrain.checkpoint.commands.survey import (
    CheckpointRow,
    CheckpointState,
    FindSnapshots,
    list_folders,
    locate,
    merge,
    resume_choice,
    survey,
)
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.folder import Held, is_private, look, run_folder, run_name
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


def _document(row: CheckpointRow, *, resume: bool) -> JsonValue:
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


def _text(rows: Sequence[CheckpointRow], *, chosen: CheckpointRow | None, url: str, now: float) -> str:
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


def _state_text(row: CheckpointRow) -> str:
    signed = ", signed" if row.signed else ""
    return f"{row.state.value}{signed}: {row.reason}" if row.reason else f"{row.state.value}{signed}"


def find_in_memory(run_url: str, *, memory_dir: str) -> Sequence[CheckpointRow]:
    """One row for each step that some rank's whole snapshot is of, newest first. Reads headers only."""
    folder = run_folder(memory_dir, run_url)
    steps: dict[tuple[int, str, int], list[Held]] = defaultdict(list)
    for held in look(folder, host=0) if is_private(folder) else ():
        if held.facts.run == run_name(run_url):
            steps[(held.facts.step, held.facts.incarnation, held.facts.world_size)].append(held)
    return [_row(folder, step, world_size, of_step) for (step, _, world_size), of_step in sorted(steps.items(), reverse=True)]


def _row(folder: str, step: int, world_size: int, held: Sequence[Held]) -> CheckpointRow:
    missing = sorted(set(range(world_size)) - {one.facts.rank for one in held})
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    created = min(one.facts.created for one in held)
    return CheckpointRow(
        name=f"snapshot of step {step}",
        step=step,
        tier="memory" if not all(one.replica for one in held) else "replica",
        state=CheckpointState.PARTIAL if missing else CheckpointState.VALID,
        reason=f"rank{'s' if len(missing) > 1 else ''} {named} not on this host" if missing else "",
        created=created,
        modified=created,
        size_bytes=sum(os.stat(f"{folder}/{one.slot}").st_size for one in held),  # noqa: PTH116
        world_size=world_size,
        num_files=len(held),
    )
