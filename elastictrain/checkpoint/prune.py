"""Carries out what `retention` plans, and knows which checkpoints are intact."""

import logging
from collections.abc import Collection, Sequence

from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.folders import FolderFacts, Listing, key_of
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.marks import mark_committed
from elastictrain.checkpoint.retention import Deletion, plan_retention
from elastictrain.checkpoint.retry_read import find_missing, is_there, retry_read
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.target import list_checkpoints
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


class Pruner:
    """Deletes superseded checkpoints; reads each manifest once."""

    def __init__(self, store: Store, *, keep_last: int, keep_every: int, signing: SigningKey | None = None) -> None:
        """With a key, checkpoints that are not signed with it are neither counted nor deleted."""
        self._signing = signing
        self._store = store
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._manifests: dict[str, Manifest | None] = {}
        self._unknown: set[str] = set()

    def prune(self, newest: str, *, manifest: Manifest) -> tuple[str, ...]:
        """Deletes what `newest`, just committed with `manifest`, supersedes; the names of the checkpoints deleted.

        What is off the line that the run took (see `lineage`) is not kept in the place of what is on it, and goes when damaged
        folders do. Where `newest` is off the line itself, nothing goes: the line is not ours to prune.

        Raises: StorageError; what is then left half deleted is no checkpoint any more, and goes at the next call.
        """
        self._manifests[newest] = manifest
        folders = list_checkpoints(self._store).folders
        self._manifests = {name: kept for name, kept in self._manifests.items() if any(f.name == name for f in folders)}
        intact = {folder.name for folder in folders if self._intact(folder)}
        deletions = self._plan(folders, newest=newest, intact=intact)
        if deletions:
            # Asked only now: most saves of a young run delete nothing.
            _, off_line = Lineage(self._store).line_first(folders)
            deletions = self._plan(folders, newest=newest, intact=intact - off_line) if off_line else deletions
        for deletion in deletions:
            if MANIFEST_NAME in deletion.files or not is_there(self._store, key_of(deletion.folder, MANIFEST_NAME)):
                self._delete(deletion)
            else:
                # The listing lags, or a predecessor that is not gone yet has committed since, or it is a link.
                logger.warning("%s is not deleted: it has a manifest that was not listed", deletion.folder)
        return tuple(deletion.folder for deletion in deletions if deletion.committed)

    def tidy(
        self, newest: str, *, manifest: Manifest, listing: Listing, incarnation: str, time_s: float, fence: Fence
    ) -> tuple[str, ...]:
        """After a commit: notes that the run has a checkpoint, and prunes. What the store refuses is left for the next time.

        `listing` is how things were found before the save.
        """
        mark_committed(self._store, listing=listing, note={"checkpoint": newest, "time": time_s, "incarnation": incarnation})
        try:
            fence.check(incarnation, step=manifest.step)
            return self.prune(newest, manifest=manifest)
        except (StorageError, LeaseLostError) as error:
            logger.warning("old checkpoints could not be deleted: %s", error)
            return ()

    def _plan(self, folders: Sequence[FolderFacts], *, newest: str, intact: Collection[str]) -> tuple[Deletion, ...]:
        return plan_retention(
            folders,
            newest=newest,
            intact=intact,
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            unknown=self._unknown,
        )

    def _intact(self, folder: FolderFacts) -> bool:
        if not folder.has_manifest or folder.quarantined:
            return False
        if folder.name not in self._manifests:
            self._manifests[folder.name] = self._read(folder.name)
        manifest = self._manifests[folder.name]
        return (
            manifest is not None and manifest.step == folder.step and find_missing(self._store, manifest, folder=folder) is None
        )

    def _read(self, folder: str) -> Manifest | None:
        try:
            return read_manifest(self._store, folder, signing=self._signing)
        except (UnknownFormatError, UntrustedCheckpointError) as error:
            logger.warning("left alone: %s", error)
            self._unknown.add(folder)
            return None

    def _delete(self, deletion: Deletion) -> None:
        for file in deletion.files:
            self._store.delete(key_of(deletion.folder, file))
        logger.info("deleted %s %s", "checkpoint" if deletion.committed else "remnant", deletion.folder)


def read_manifest(store: Store, folder: str, *, signing: SigningKey | None = None) -> Manifest | None:
    """The manifest of a folder, or None if it is not a valid one.

    Raises: UnknownFormatError; UntrustedCheckpointError if it is not signed with the key that is given; StorageError.
    """
    key = key_of(folder, MANIFEST_NAME)
    try:
        return retry_read(store, key, where=f"{store.url}/{key}", signing=signing)[1]
    except UntrustedCheckpointError:
        raise
    except (InvalidCheckpointError, ObjectNotFoundError):
        return None
