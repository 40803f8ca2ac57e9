"""What the commands find at a URL: the run, its checkpoints and the state of each, and the one to work on."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from elastictrain.checkpoint.candidate_search import FreshStart, Refuse, select_checkpoint
from elastictrain.checkpoint.commands.output import note
from elastictrain.checkpoint.folders import (
    QUARANTINE_NAME,
    ROOT,
    FolderFacts,
    Listing,
    Reject,
    is_there,
    key_of,
    quarantine_reason,
    read_listing,
)
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.run_folder import CONFIG_NAME
from elastictrain.checkpoint.signing import SigningKey, load_key
from elastictrain.checkpoint.verified_read import CheckpointFolder, examine
from elastictrain.errors import NoValidCheckpointError, ObjectNotFoundError, UnknownFormatError, UsageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class RunLocation:
    """A run, and the name of the checkpoint folder that was asked for, if it was one."""

    run: Store
    folder: str | None = None
    signing: SigningKey | None = None
    """The key that checkpoints must be signed with."""

    @property
    def url(self) -> str:
        """Of the folder of all checkpoints."""
        return f"{self.run.url}/{ROOT}"


def locate(url: str, *, key_env: str = "") -> RunLocation:
    """What `url` means: a run's folder, its folder `checkpoints`, or one checkpoint in that; with the key in `key_env`.

    Raises: ObjectNotFoundError if there is no run; UsageError, also if `key_env` holds no key; ConfigError; StorageError.
    """
    try:
        signing = load_key(key_env)
    except ValueError as error:
        raise UsageError(f"--key-env {error}") from error
    return replace(_locate(url), signing=signing)


def _locate(url: str) -> RunLocation:
    name, parent = split_url(url)
    if is_checkpoint_name(name):
        above, run_url = split_url(parent)
        if above != ROOT:
            raise UsageError(
                f"{url} must lie in a folder {ROOT!r}, as in RUN/{ROOT}/{name}; bring a copy of a checkpoint into such a folder"
            )
        return RunLocation(open_store(run_url), name)
    run = open_store(url)
    if _has_checkpoints(run):
        return RunLocation(run)
    if name == ROOT and _has_checkpoints(above_run := open_store(parent)):
        return RunLocation(above_run)
    # A run writes its configuration first, and a checkpoint much later.
    if not is_there(run, CONFIG_NAME):
        raise ObjectNotFoundError(
            f"{run.url} must be the folder of a run or a checkpoint in it, but holds neither {ROOT}/ nor {CONFIG_NAME}"
        )
    return RunLocation(run)


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of that name can be a checkpoint."""
    return bool(read_listing([ObjectInfo(key_of(name, "file"), 0, 0.0)]).folders)


def split_url(url: str) -> tuple[str, str]:
    """The last part of a path or URL, and what is above it; nothing is above a bucket."""
    protocol, separator, rest = url.rstrip("/").partition("://")
    if separator:
        above, _, name = rest.rpartition("/")
        return (name, f"{protocol}://{above}") if above else ("", url)
    path = os.path.expanduser(url)  # noqa: PTH111
    # By name alone, not by links: what the person calls `checkpoints` counts.
    return os.path.basename(os.path.abspath(path)), os.path.normpath(f"{path}/..")  # noqa: PTH100, PTH119


def _has_checkpoints(run: Store) -> bool:
    return next(iter(run.list(ROOT)), None) is not None


class CheckpointState(StrEnum):
    """What is known of a checkpoint without reading the bytes of its tensors."""

    VALID = "valid"
    QUARANTINED = "quarantined"
    UNCOMMITTED = "uncommitted"
    DAMAGED = "damaged"
    UNTRUSTED = "untrusted"
    """Not signed with the key that was given."""

    UNKNOWN = "unknown format"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint. `modified` and `created` are unix seconds; `created` and `world_size` are unknown without a manifest."""

    name: str
    step: int
    tier: str
    """`storage`, or where else it is held."""

    state: CheckpointState
    reason: str
    """Why the state is not `valid`; empty if it is."""

    created: float | None
    modified: float
    size_bytes: int
    world_size: int | None
    num_files: int
    signed: bool | None = None
    """Whether its manifest bears a signature; unknown without a manifest."""


class FindSnapshots(Protocol):
    """Looks for snapshots of a run that this machine holds outside of storage."""

    def __call__(self, run_url: str, /) -> Sequence[CheckpointRow]:
        """One row for each; `run_url` is the run's folder, as the person wrote it."""


def merge(stored: Sequence[CheckpointRow], snapshots: Sequence[CheckpointRow]) -> tuple[CheckpointRow, ...]:
    """Newest first; at the same step a snapshot before what is stored. Each of the two keeps its own order within a step."""
    return tuple(sorted([*snapshots, *stored], key=lambda row: -row.step))


def resume_choice(rows: Sequence[CheckpointRow]) -> CheckpointRow | None:
    """The row, of all of a run's, newest first, that a start tries first; None if it would not resume."""
    for row in rows:
        if row.state is CheckpointState.UNKNOWN:
            # A start stops here rather than to lose what it cannot read.
            return None
        if row.state is CheckpointState.VALID:
            return row
    return None


_READERS = 8
_UNCOMMITTED = "being written, or cut short"


@dataclass(frozen=True, slots=True)
class ListedFolder:
    """One folder as listed, and when the newest of its files was written (unix seconds)."""

    facts: FolderFacts
    modified: float


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One folder and what its manifest says, where it can be read."""

    run: Store
    listed: ListedFolder
    state: CheckpointState
    reason: str
    manifest: Manifest | None

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.listed.facts.name

    @property
    def url(self) -> str:
        """Of the folder."""
        return f"{self.run.url}/{ROOT}/{self.name}"

    @property
    def row(self) -> CheckpointRow:
        """What `ls` tells of it."""
        facts, manifest = self.listed.facts, self.manifest
        return CheckpointRow(
            name=facts.name,
            step=facts.step,
            tier="storage",
            state=self.state,
            reason=self.reason,
            created=None if manifest is None else manifest.created,
            modified=self.listed.modified,
            size_bytes=sum(facts.files.values()),
            world_size=None if manifest is None else manifest.world_size,
            signed=None if manifest is None else bool(manifest.signature),
            num_files=len(facts.files.keys() - {MANIFEST_NAME, QUARANTINE_NAME}),
        )


def list_folders(location: RunLocation) -> tuple[ListedFolder, ...]:
    """All checkpoint folders of the run, newest first. Raises: StorageError."""
    infos = list(location.run.list(ROOT))
    modified: dict[str, float] = {}
    for info in infos:
        name = info.key.split("/")[1]
        modified[name] = max(modified.get(name, 0.0), info.modified)
    return tuple(ListedFolder(facts, modified[facts.name]) for facts in read_listing(infos).folders)


def survey(location: RunLocation, folders: Iterable[ListedFolder]) -> tuple[Surveyed, ...]:
    """Reads manifests, some at once; leaves out folders that the run deletes meanwhile.

    Raises: StorageError.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="survey") as pool:
        found = pool.map(lambda listed: _look_at(location, listed), folders)
        return tuple(one for one in found if one is not None)


def _look_at(location: RunLocation, listed: ListedFolder) -> Surveyed | None:
    run, facts = location.run, listed.facts
    manifest: Manifest | None = None
    state, reason = CheckpointState.UNCOMMITTED, _UNCOMMITTED
    if facts.has_manifest:
        try:
            found = examine(run, facts, signing=location.signing)
        except ObjectNotFoundError:
            return None
        except UnknownFormatError as error:
            # What to do about it is told where somebody wants to use it.
            state, reason = CheckpointState.UNKNOWN, _short(str(error), run=run, name=facts.name).partition(";")[0]
        else:
            manifest, state, reason = found.manifest, CheckpointState.VALID, ""
            if found.reject is not None:
                state = CheckpointState.DAMAGED if found.reject.lasting else CheckpointState.UNTRUSTED
                reason = _short(found.reject.reason, run=run, name=facts.name)
    if facts.quarantined:
        state, reason = CheckpointState.QUARANTINED, _short(quarantine_reason(run, facts.name), run=run, name=facts.name)
    return Surveyed(run, listed, state, reason, manifest)


def _short(reason: str, *, run: Store, name: str) -> str:
    """Without the URL of the folder, which stands above."""
    return reason.replace(f"{run.url}/{key_of(name, '')}", "")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is valid and whose files are all there in their sizes; bytes are verified when read."""

    name: str
    folder: CheckpointFolder
    manifest: Manifest

    @property
    def url(self) -> str:
        """Of its folder."""
        return self.folder.url("").rstrip("/")


def find_checkpoint(location: RunLocation, *, step: int | None = None, rejected: Sequence[Reject] = ()) -> Checkpoint:
    """The newest checkpoint that will do, without the `rejected` ones.

    Raises: NoValidCheckpointError; UnknownFormatError; StorageError.
    """
    run, rejects = location.run, list(rejected)
    which = "" if step is None else f" of step {step}"
    while True:
        # Listed anew each time: a run that is still training saves and prunes meanwhile.
        listing = read_listing(run.list(ROOT))
        wanted = tuple(
            folder
            for folder in listing.folders
            if (step is None or folder.step == step) and location.folder in (None, folder.name)
        )
        decision = select_checkpoint(Listing(wanted, begun=False), rejected=rejects, on_invalid="stop")
        if isinstance(decision, FreshStart):
            raise NoValidCheckpointError(_nothing(location, listing, which=which))
        if isinstance(decision, Refuse):
            lines = "\n".join(f"  - {reject}" for reject in decision.rejects)
            raise NoValidCheckpointError(f"{location.url} has no valid checkpoint{which}:\n{lines}")
        facts = decision
        try:
            found = examine(run, facts, signing=location.signing)
        except ObjectNotFoundError as error:
            rejects.append(Reject(facts.name, MANIFEST_NAME, str(error)))
            continue
        if found.reject is None and found.manifest is not None:
            say_unchecked(found.manifest, name=facts.name, signing=location.signing)
            return Checkpoint(facts.name, CheckpointFolder(run, f"{ROOT}/{facts.name}/"), found.manifest)
        if found.reject is not None:
            rejects.append(found.reject)


def say_unchecked(manifest: Manifest, *, name: str, signing: SigningKey | None) -> None:
    """That a signature is there, where nobody has given the key to check it."""
    if manifest.signature and signing is None:
        note(f"{name} is signed, and nobody checks it: give --key-env NAME")


def _nothing(location: RunLocation, listing: Listing, *, which: str) -> str:
    steps = sorted({folder.step for folder in listing.folders if folder.has_manifest})
    there = f"; there is step {', '.join(map(str, steps))}" if steps else ""
    if location.folder is not None:
        return f"{location.url} must hold {location.folder}{which}, but does not{there}"
    return f"{location.url} must hold a checkpoint{which}, but does not{there}"
