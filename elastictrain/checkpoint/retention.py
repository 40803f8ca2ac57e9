"""Which checkpoints are deleted after a save, and their deletion.

Rules:

- Nothing goes unless a newer checkpoint, verified by this process and still intact, supersedes it: `newest` and all newer stay.
- The `keep_last` newest intact checkpoints stay (`newest` is the first of them), and all at multiples of `keep_every`.
  A folder that is not intact is never counted in the place of one that is.
- Remnants (no manifest) older than `newest` go.
- Checkpoints of a format that this release does not read stay.
- Damaged folders (quarantined, or not intact) stay for the person until they are older than everything that is kept.
- The manifest goes first, so that a deletion cut short leaves a remnant, which no start takes and the next prune removes. The
  quarantine mark goes last.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass

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
from elastictrain.errors import (
    InvalidCheckpointError,
    LeaseLostError,
    ObjectNotFoundError,
    StorageError,
    UnknownFormatError,
    UntrustedCheckpointError,
)
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deletion:
    """One folder to delete; its files in the order in which they go."""

    folder: str
    files: tuple[str, ...]
    committed: bool
    """Whether it was a valid checkpoint, rather than a remnant or a damaged one."""


def plan_retention(
    folders: Sequence[FolderFacts],
    *,
    newest: str,
    intact: Collection[str],
    keep_last: int,
    keep_every: int,
    unknown: Collection[str] = (),
) -> tuple[Deletion, ...]:
    """Deletions, oldest first. `newest` is verified; `intact` names folders whose manifest and files check out; `unknown` those
    of a format that this release does not read.
    """
    verified = next((folder for folder in folders if folder.name == newest and newest in intact), None)
    if verified is None or not verified.has_manifest or verified.quarantined:
        return ()
    older = sorted((folder for folder in folders if folder.order < verified.order), key=lambda folder: folder.order)
    valid = [folder for folder in older if folder.name in intact and folder.has_manifest and not folder.quarantined]
    kept = {folder.name for folder in valid[max(0, len(valid) - (keep_last - 1)) :]}
    kept |= {folder.name for folder in valid if keep_every and folder.step % keep_every == 0}
    oldest_kept = min((folder.order for folder in valid if folder.name in kept), default=verified.order)
    valid_names = {folder.name for folder in valid}
    deletions = []
    for folder in older:
        if folder.name in kept or folder.name in unknown:
            continue
        damaged = folder.quarantined or (folder.has_manifest and folder.name not in valid_names)
        if not damaged or folder.order < oldest_kept:
            # The manifest first, the quarantine mark last.
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
    signing: SigningKey | None = None
    """With a key, checkpoints that are not signed with it are neither counted nor deleted."""

    def __post_init__(self) -> None:
        self._manifests: dict[str, Manifest | None] = {}
        self._unknown: set[str] = set()

    def prune(self, newest: str, *, manifest: Manifest) -> tuple[str, ...]:
        """Deletes what `newest`, just committed with `manifest`, supersedes; the names of the checkpoints deleted.

        What is off the line that the run took (see `lineage`) is not kept in the place of what is on it, and goes when damaged
        folders do. Where `newest` is off the line itself, nothing goes: the line is not ours to prune.

        Raises: StorageError; what is then left half deleted is no checkpoint any more, and goes at the next call.
        """
        self._manifests[newest] = manifest
        folders = list_checkpoints(self.store).folders
        self._manifests = {name: kept for name, kept in self._manifests.items() if any(f.name == name for f in folders)}
        intact = {folder.name for folder in folders if self._intact(folder)}

        def plan(intact: Collection[str]) -> tuple[Deletion, ...]:
            return plan_retention(
                folders,
                newest=newest,
                intact=intact,
                keep_last=self.keep_last,
                keep_every=self.keep_every,
                unknown=self._unknown,
            )

        deletions = plan(intact)
        if deletions:
            # Asked only now: most saves of a young run delete nothing.
            _, off_line = Lineage(self.store).line_first(folders)
            deletions = plan(intact - off_line)
        deleted = [deletion for deletion in deletions if delete_folder(self.store, deletion)]
        return tuple(deletion.folder for deletion in deleted if deletion.committed)

    def tidy(self, newest: str, *, manifest: Manifest, listing: Listing, time_s: float, fence: Fence) -> tuple[str, ...]:
        """After a commit: notes that the run has a checkpoint, and prunes. What the store refuses is left for the next time.

        `listing` is how things were found before the save.
        """
        note: dict[str, JsonValue] = {"checkpoint": newest, "time": time_s, "incarnation": manifest.incarnation}
        mark_committed(self.store, listing=listing, note=note)
        try:
            fence.check(manifest.incarnation, step=manifest.step)
            return self.prune(newest, manifest=manifest)
        except (StorageError, LeaseLostError) as error:
            logger.warning("old checkpoints could not be deleted: %s", error)
            return ()

    def _intact(self, folder: FolderFacts) -> bool:
        if not folder.has_manifest or folder.quarantined:
            return False
        if folder.name not in self._manifests:
            try:
                self._manifests[folder.name] = read_manifest(self.store, folder.name, signing=self.signing)
            except (UnknownFormatError, UntrustedCheckpointError) as error:
                logger.warning("left alone: %s", error)
                self._unknown.add(folder.name)
                self._manifests[folder.name] = None
        manifest = self._manifests[folder.name]
        return (
            manifest is not None and manifest.step == folder.step and find_missing(self.store, manifest, folder=folder) is None
        )


def delete_folder(store: Store, deletion: Deletion) -> bool:
    """Whether the folder was deleted; it is not if it has become a checkpoint since it was listed. Raises: StorageError."""
    if MANIFEST_NAME not in deletion.files and is_there(store, key_of(deletion.folder, MANIFEST_NAME)):
        # The listing lags, or a predecessor that is not gone yet has committed since, or it is a link.
        logger.warning("%s is not deleted: it has a manifest that was not listed", deletion.folder)
        return False
    for file in deletion.files:
        store.delete(key_of(deletion.folder, file))
    logger.info("deleted %s %s", "checkpoint" if deletion.committed else "remnant", deletion.folder)
    return True


def read_manifest(store: Store, folder: str, *, signing: SigningKey | None = None) -> Manifest | None:
    """The manifest of a folder, or None if it is not a valid one.

    Raises: UnknownFormatError; UntrustedCheckpointError if it is not signed with the key that is given; StorageError.
    """
    try:
        return retry_read(store, key_of(folder, MANIFEST_NAME), signing=signing)[1]
    except UntrustedCheckpointError:
        raise
    except (InvalidCheckpointError, ObjectNotFoundError):
        return None
