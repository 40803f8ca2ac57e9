"""Which checkpoints are deleted after a save, and their deletion.

Rules:

- A folder is deleted only if a newer checkpoint, verified by this process and intact, supersedes it: `newest` and newer stay.
- The `keep_last` newest intact checkpoints stay (`newest` is the first of them), all at multiples of `keep_every`, and those of
  the best steps.
  A folder that is not intact never counts.
- Remnants (no manifest) older than `newest` are deleted.
- Checkpoints of a format that this release does not read stay.
- Damaged folders (quarantined, or not intact) stay for the user until they are older than everything that is kept.
- The manifest is deleted first: a deletion cut short leaves a remnant, which no start takes and the next prune deletes. The
  quarantine marker is deleted last.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

from elastictrain import errors
from elastictrain.checkpoint.evaluations import read_evaluations
from elastictrain.checkpoint.folders import (
    QUARANTINE_NAME,
    FolderFacts,
    Listing,
    is_there,
    key_of,
    list_checkpoints,
    mark_committed,
)
from elastictrain.checkpoint.lineage import Fence, Lineage
from elastictrain.checkpoint.manifest import MANIFEST_NAME, JsonValue, Manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import find_missing, retry_read
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deletion:
    """One folder to delete, with its files in the order of deletion."""

    folder: str
    files: tuple[str, ...]
    committed: bool  # a valid checkpoint, not a remnant or a damaged one


def plan_retention(
    folders: Sequence[FolderFacts],
    *,
    newest: str,
    intact: Collection[str],
    keep_last: int,
    keep_every: int,
    best: Collection[int] = (),
    unknown: Collection[str] = (),
) -> tuple[Deletion, ...]:
    """Deletions, oldest first. `intact` names the folders whose manifest and files are valid, and `newest` must be among them;
    `best` has the steps of the lowest losses; `unknown` names those of a format that this release does not read."""
    verified = next((folder for folder in folders if folder.name == newest and newest in intact), None)
    if verified is None or not verified.has_manifest or verified.quarantined:
        return ()
    older = sorted((folder for folder in folders if folder.order < verified.order), key=lambda folder: folder.order)
    valid = [folder for folder in older if folder.name in intact and folder.has_manifest and not folder.quarantined]
    kept = {folder.name for folder in valid[max(0, len(valid) - (keep_last - 1)) :]}
    kept |= {folder.name for folder in valid if (keep_every and folder.step % keep_every == 0) or folder.step in best}
    oldest_kept = min((folder.order for folder in valid if folder.name in kept), default=verified.order)
    valid_names = {folder.name for folder in valid}
    deletions = []
    for folder in older:
        if folder.name in kept or folder.name in unknown:
            continue
        damaged = folder.quarantined or (folder.has_manifest and folder.name not in valid_names)
        if not damaged or folder.order < oldest_kept:
            files = sorted(folder.files, key=lambda name: (name != MANIFEST_NAME, name == QUARANTINE_NAME, name))
            deletions.append(Deletion(folder.name, tuple(files), folder.name in valid_names))
    return tuple(deletions)


@dataclass
class Pruner:
    """Deletes superseded checkpoints; reads each manifest once."""

    store: Store
    _: KW_ONLY
    keep_last: int
    keep_every: int
    signing: SigningKey | None = None  # with a key, checkpoints not signed with it neither count nor are deleted

    def __post_init__(self) -> None:
        self._manifests: dict[str, Manifest | None] = {}
        self._unknown: set[str] = set()

    def prune(self, newest: str, *, manifest: Manifest) -> tuple[str, ...]:
        """Delete what `newest`, just committed with `manifest`, supersedes; returns the names of the deleted checkpoints.

        Checkpoints off the lineage of the run do not count, and are deleted like damaged folders. If `newest` itself is off the
        lineage, nothing is deleted: the lineage belongs to another generation.

        Raises: StorageError; a half deleted folder is no checkpoint any more, and the next call deletes the rest.
        """
        self._manifests[newest] = manifest
        folders = list_checkpoints(self.store).folders
        self._manifests = {name: kept for name, kept in self._manifests.items() if any(f.name == name for f in folders)}
        intact = {folder.name for folder in folders if self._intact(folder)}

        rules = partial(plan_retention, keep_last=self.keep_last, keep_every=self.keep_every, unknown=self._unknown)
        plan = partial(rules, folders, newest=newest)
        deletions = plan(intact=intact)
        if deletions:
            # The lineage and the evaluations are read only now: most saves of a young run delete nothing.
            _, off_lineage = Lineage(self.store).lineage_first(folders)
            deletions = plan(intact=intact - off_lineage, best=read_evaluations(self.store).best)
        deleted = [deletion for deletion in deletions if delete_folder(self.store, deletion)]
        return tuple(deletion.folder for deletion in deleted if deletion.committed)

    def tidy(self, newest: str, *, manifest: Manifest, listing: Listing, time_s: float, fence: Fence) -> tuple[str, ...]:
        """Mark the run as committed and prune; the next call repeats what fails. `listing` is from before the save."""
        note: dict[str, JsonValue] = {"checkpoint": newest, "time": time_s, "incarnation": manifest.incarnation}
        mark_committed(self.store, listing=listing, note=note)
        try:
            fence.check(manifest.incarnation, step=manifest.step)
            return self.prune(newest, manifest=manifest)
        except (errors.StorageError, errors.LeaseLostError) as error:
            logger.warning("old checkpoints could not be deleted: %s", error)
            return ()

    def _intact(self, folder: FolderFacts) -> bool:
        if not folder.has_manifest or folder.quarantined:
            return False
        if folder.name not in self._manifests:
            try:
                self._manifests[folder.name] = read_manifest(self.store, folder.name, signing=self.signing)
            except (errors.UnknownFormatError, errors.UntrustedCheckpointError) as error:
                logger.warning("left alone: %s", error)
                self._unknown.add(folder.name)
                self._manifests[folder.name] = None
        manifest = self._manifests[folder.name]
        return (
            manifest is not None and manifest.step == folder.step and find_missing(self.store, manifest, folder=folder) is None
        )


def delete_folder(store: Store, deletion: Deletion) -> bool:
    """Returns False, and keeps the folder, if it has become a checkpoint since the listing. Raises: StorageError."""
    if MANIFEST_NAME not in deletion.files and is_there(store, key_of(deletion.folder, MANIFEST_NAME)):
        # The listing lags, a previous generation that has not ended yet has committed since, or it is a link.
        logger.warning("%s is not deleted: it has a manifest that was not listed", deletion.folder)
        return False
    for file in deletion.files:
        store.delete(key_of(deletion.folder, file))
    logger.info("deleted %s %s", "checkpoint" if deletion.committed else "remnant", deletion.folder)
    return True


def read_manifest(store: Store, folder: str, *, signing: SigningKey | None = None) -> Manifest | None:
    """None if it is not valid. Raises: UnknownFormatError; UntrustedCheckpointError (not signed with the key); StorageError."""
    try:
        return retry_read(store, key_of(folder, MANIFEST_NAME), signing=signing)[1]
    except errors.UntrustedCheckpointError:
        raise
    except (errors.InvalidCheckpointError, errors.ObjectNotFoundError):
        return None
