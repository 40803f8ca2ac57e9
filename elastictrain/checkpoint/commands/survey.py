"""What a URL names: the run, its checkpoints with their states, and the one to work on. And `ls`, which lists them."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from elastictrain.checkpoint.commands.output import age_text, note, result, result_json, size_text, table
from elastictrain.checkpoint.folders import (
    FOLDER_NAME,
    QUARANTINE_NAME,
    ROOT,
    FolderFacts,
    Reject,
    is_there,
    key_of,
    list_checkpoints,
    quarantine_reason,
)
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.memory.folder import Held, is_private, look, run_folder, run_name
from elastictrain.checkpoint.run_folder import CONFIG_NAME
from elastictrain.checkpoint.signing import SigningKey, load_key
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, examine, read_parts
from elastictrain.errors import EXIT_OK, NoValidCheckpointError, ObjectNotFoundError, UnknownFormatError, UsageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store


@dataclass(frozen=True, slots=True)
class RunLocation:
    """A run, and the checkpoint folder in it if the URL names one."""

    run: Store
    folder: str | None = None
    signing: SigningKey | None = None

    @property
    def url(self) -> str:
        return f"{self.run.url}/{ROOT}"

    def missing_message(self, step: int | None) -> str:
        """The error for a checkpoint that does not exist, with the steps that do. Raises: StorageError."""
        which = "" if step is None else f" of step {step}"
        what = f"a checkpoint{which}" if self.folder is None else f"{self.folder} as a checkpoint{which}"
        steps = sorted({folder.step for folder in list_checkpoints(self.run).folders if folder.has_manifest})
        there = f"; there is step {', '.join(map(str, steps))}" if steps else ""
        return f"{self.url} must hold {what}, but does not{there}"


def locate(url: str, *, key_env: str = "") -> RunLocation:
    """Resolve `url`: a run's folder, its folder `checkpoints`, or one checkpoint in that. `key_env` names the key's variable.

    Raises: ObjectNotFoundError if there is no run; UsageError, also if `key_env` holds no key; ConfigError; StorageError.
    """
    try:
        signing = load_key(key_env)
    except ValueError as error:
        raise UsageError(f"--key-env {error}") from error
    name, parent = split_url(url)
    if FOLDER_NAME.fullmatch(name):
        above, run_url = split_url(parent)
        if above != ROOT:
            raise UsageError(
                f"{url} must lie in a folder {ROOT!r}, as in RUN/{ROOT}/{name}; bring a copy of a checkpoint into such a folder"
            )
        return RunLocation(open_store(run_url), name, signing)
    run = open_store(url)
    if not _has_checkpoints(run):
        if name == ROOT and _has_checkpoints(above_run := open_store(parent)):
            return RunLocation(above_run, None, signing)
        # A run writes its configuration first, and checkpoints much later.
        if not is_there(run, CONFIG_NAME):
            raise ObjectNotFoundError(
                f"{run.url} must be the folder of a run or a checkpoint in it, but holds neither {ROOT}/ nor {CONFIG_NAME}"
            )
    return RunLocation(run, None, signing)


def split_url(url: str) -> tuple[str, str]:
    """The last part of a path or URL, and its parent; a bucket has none."""
    protocol, separator, rest = url.rstrip("/").partition("://")
    if separator:
        above, _, name = rest.rpartition("/")
        return (name, f"{protocol}://{above}") if above else ("", url)
    path = os.path.expanduser(url)  # noqa: PTH111
    # Links are not resolved: the name that the user gives counts.
    return os.path.basename(os.path.abspath(path)), os.path.normpath(f"{path}/..")  # noqa: PTH100, PTH119


def _has_checkpoints(run: Store) -> bool:
    return next(iter(run.list(ROOT)), None) is not None


class CheckpointState(StrEnum):
    """The state of a checkpoint, as far as known without its tensors' bytes."""

    VALID = "valid"
    QUARANTINED = "quarantined"
    UNCOMMITTED = "uncommitted"
    DAMAGED = "damaged"
    UNTRUSTED = "untrusted"

    UNKNOWN = "unknown format"
    PARTIAL = "partial"


_READERS = 8


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One folder, and its manifest if that can be read."""

    run: Store
    facts: FolderFacts
    state: CheckpointState
    reason: str  # why it is not valid
    manifest: Manifest | None
    bad_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # their problems; set after all bytes were read
    gone: bool = False

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def url(self) -> str:
        return f"{self.run.url}/{ROOT}/{self.name}"

    @property
    def shard_bytes(self) -> int:
        return 0 if self.manifest is None else self.manifest.size_bytes


def survey(location: RunLocation, folders: Iterable[FolderFacts]) -> tuple[Surveyed, ...]:
    """Read the manifests, several at once; folders that the run deletes meanwhile are left out. Raises: StorageError."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="survey") as pool:
        found = pool.map(lambda facts: _look_at(location, facts), folders)
        return tuple(one for one in found if one is not None)


def _look_at(location: RunLocation, facts: FolderFacts) -> Surveyed | None:
    run = location.run
    manifest: Manifest | None = None
    state, reason = CheckpointState.UNCOMMITTED, "being written, or cut short"
    if facts.has_manifest:
        try:
            found = examine(run, facts, signing=location.signing)
        except ObjectNotFoundError:
            return None
        except UnknownFormatError as error:
            # The remedy, after the semicolon, is for those who use the checkpoint.
            state, reason = CheckpointState.UNKNOWN, str(error).partition(";")[0]
        else:
            manifest, state, reason = found.manifest, CheckpointState.VALID, ""
            if found.reject is not None:
                state = CheckpointState.DAMAGED if found.reject.lasting else CheckpointState.UNTRUSTED
                reason = found.reject.reason
    if facts.quarantined:
        state, reason = CheckpointState.QUARANTINED, quarantine_reason(run, facts.name)
    # The output has the URL of the folder above.
    return Surveyed(run, facts, state, reason.replace(f"{run.url}/{key_of(facts.name, '')}", ""), manifest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with a valid manifest, its parts, and all files in their sizes; bytes are verified when they are read."""

    name: str
    folder: CheckpointFolder
    manifest: Manifest

    @property
    def url(self) -> str:
        return self.folder.url("").rstrip("/")


def find_checkpoint(location: RunLocation, *, step: int | None = None, rejected: Sequence[Reject] = ()) -> Checkpoint:
    """The newest that is valid and not `rejected`. Raises: NoValidCheckpointError; UnknownFormatError; StorageError."""
    run, rejects = location.run, {reject.folder: reject for reject in rejected}
    while True:
        # Listed anew each time: a run that trains saves and prunes meanwhile.
        wanted = [
            folder
            for folder in list_checkpoints(run).folders
            if step in (None, folder.step) and location.folder in (None, folder.name)
        ]
        if not wanted:
            raise NoValidCheckpointError(location.missing_message(step))
        candidates = [one for one in wanted if one.has_manifest and not one.quarantined and one.name not in rejects]
        if not candidates:
            reasons = {one.name: f"{one.name}: {one.state.value}: {one.reason}" for one in survey(location, wanted)}
            lines = "".join(f"\n  - {rejects.get(name, reason)}" for name, reason in reasons.items())
            which = "" if step is None else f" of step {step}"
            raise NoValidCheckpointError(f"{location.url} has no valid checkpoint{which}:{lines}")
        newest = candidates[0]
        try:
            found = examine(run, newest, signing=location.signing)
        except ObjectNotFoundError as error:
            rejects[newest.name] = Reject(newest.name, MANIFEST_NAME, str(error))
            continue
        if found.reject is not None:
            rejects[newest.name] = found.reject
        elif found.manifest is not None:
            note_unchecked(found.manifest, name=newest.name, signing=location.signing)
            folder = CheckpointFolder(run, f"{ROOT}/{newest.name}/")
            try:
                return Checkpoint(newest.name, folder, read_parts(folder, found.manifest))
            except DamagedFileError as error:
                rejects[newest.name] = Reject(newest.name, error.file, str(error))


def note_unchecked(manifest: Manifest, *, name: str, signing: SigningKey | None) -> None:
    if manifest.signature and signing is None:
        note(f"{name} is signed, and nobody checks it: give --key-env NAME")


class CheckpointRow(msgspec.Struct, frozen=True, rename={"size_bytes": "bytes", "num_files": "files"}):
    """One checkpoint, as `ls` shows it. `modified` and `created` are unix seconds."""

    name: str
    step: int
    tier: str  # `storage`, `memory` or `replica`
    state: CheckpointState
    reason: str
    modified: float
    size_bytes: int
    num_files: int
    created: float | None = None  # this and the next two are unknown without a manifest
    world_size: int | None = None
    signed: bool | None = None


_HEADER = ("", "name", "step", "age", "size", "world", "files", "tier", "state")
_FIGURES = ("step", "age", "size", "world", "files")


def show_checkpoints(
    url: str, *, as_json: bool, memory_dir: str, clock: Callable[[], float] = time.time, key_env: str = ""
) -> int:
    """`ls`; marks the one that a start would take. Raises: NoValidCheckpointError; ObjectNotFoundError; StorageError."""
    location = locate(url, key_env=key_env)
    stored = [_stored_row(one) for one in survey(location, list_checkpoints(location.run).folders)]
    # Newest first; at the same step snapshots come first.
    every = sorted([*_snapshot_rows(location.run.url, memory_dir=memory_dir), *stored], key=lambda row: -row.step)
    chosen = resume_choice(every)
    rows = [row for row in every if location.folder in (None, row.name)]
    if not rows and location.folder is not None:
        raise NoValidCheckpointError(f"{location.url} must hold {location.folder}, but does not")
    if as_json:
        found = [{**msgspec.to_builtins(row), "resume": row is chosen} for row in rows]
        result_json({"url": location.url, "checkpoints": found})
        return EXIT_OK
    lines = [location.url]
    if rows:
        now = clock()
        cells = [
            (
                ">" if row is chosen else "",
                row.name,
                str(row.step),
                age_text(now - (row.modified if row.created is None else row.created)),
                size_text(row.size_bytes),
                "-" if row.world_size is None else str(row.world_size),
                str(row.num_files),
                row.tier,
                row.state.value + (", signed" if row.signed else "") + (f": {row.reason}" if row.reason else ""),
            )
            for row in rows
        ]
        lines.append(table(_HEADER, cells, right=_FIGURES, indent=""))
    else:
        lines.append("  no checkpoint yet")
    if any(row is chosen for row in rows):
        lines.append("> a start resumes from this one, if its bytes have their digests")
    elif rows and chosen is None:
        lines.append("none of these is one that a start can resume from")
    result("\n".join(lines))
    return EXIT_OK


def resume_choice(rows: Iterable[CheckpointRow]) -> CheckpointRow | None:
    """The row that a start tries first, of all rows of a run, newest first; None if it would not resume."""
    # At an unknown format a start stops, rather than lose what it cannot read.
    deciding = (row for row in rows if row.state in (CheckpointState.UNKNOWN, CheckpointState.VALID))
    first = next(deciding, None)
    return None if first is None or first.state is CheckpointState.UNKNOWN else first


def _stored_row(one: Surveyed) -> CheckpointRow:
    manifest, files = one.manifest, one.facts.files
    return CheckpointRow(
        one.name,
        one.facts.step,
        "storage",
        one.state,
        one.reason,
        one.facts.modified,
        sum(files.values()),
        len(files.keys() - {MANIFEST_NAME, QUARANTINE_NAME}),
        *(() if manifest is None else (manifest.created, manifest.world_size, bool(manifest.signature))),
    )


def _snapshot_rows(run_url: str, *, memory_dir: str) -> list[CheckpointRow]:
    """A row per step of which this host holds complete snapshots, newest first. Reads headers only."""
    folder = run_folder(memory_dir, run_url)
    steps: dict[tuple[int, str, int], list[Held]] = defaultdict(list)
    for one in look(folder, host=0) if is_private(folder) else ():
        if one.facts.run == run_name(run_url):
            steps[(one.facts.step, one.facts.incarnation, one.facts.world_size)].append(one)
    rows = []
    for (step, _, world_size), held in sorted(steps.items(), reverse=True):
        missing = sorted(set(range(world_size)) - {one.facts.rank for one in held})
        named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        created = min(one.facts.created for one in held)
        rows.append(
            CheckpointRow(
                f"snapshot of step {step}",
                step,
                "replica" if all(one.replica for one in held) else "memory",
                CheckpointState.PARTIAL if missing else CheckpointState.VALID,
                f"rank{'s' if len(missing) > 1 else ''} {named} not on this host" if missing else "",
                created,
                sum(os.stat(f"{folder}/{one.slot}").st_size for one in held),  # noqa: PTH116
                len(held),
                created,
                world_size,
            )
        )
    return rows
