"""The folder that a save writes to: chosen, cleared of what a dead predecessor left, and cleared again if the save fails."""

import logging
from contextlib import suppress

from elastictrain.checkpoint.folders import ROOT, Listing, SaveTarget, choose_target, key_of, read_listing
from elastictrain.checkpoint.manifest import MANIFEST_NAME
from elastictrain.checkpoint.retry_read import is_there
from elastictrain.errors import ObjectNotFoundError, StorageError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.opening import is_blocked
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


def clear_target(store: Store, listing: Listing, *, step: int, at_work: str | None = None) -> str:
    """The folder for `step`, now empty of files. Files of the incarnation that is `at_work` are left alone.

    A folder that is a link, or whose manifest is one, is not used.

    Raises: StorageError.
    """
    taken: set[str] = set()
    target = choose_target(listing.folders, step=step)
    while _is_taken(store, target, at_work=at_work):
        taken.add(target.folder)
        target = choose_target(listing.folders, step=step, committed=taken)
    for file in target.stale_files:
        store.delete(key_of(target.folder, file))
    return target.folder


def _is_taken(store: Store, target: SaveTarget, *, at_work: str | None) -> bool:
    manifest = key_of(target.folder, MANIFEST_NAME)
    if is_blocked(store, manifest):
        return True
    # A saver that hangs may go on writing there, under the names that this incarnation's files have.
    if at_work is not None and any(file.startswith(f"{at_work}-r") for file in target.stale_files):
        return True
    # Committed since it was listed, by a predecessor that is not gone yet: these are the files of a checkpoint.
    return bool(target.stale_files) and is_there(store, manifest)


def list_checkpoints(store: Store) -> Listing:
    """All checkpoint folders of a run. Raises: StorageError."""
    return read_listing(store.list(ROOT))


def discard_files(store: Store, folder: str, *, incarnation: str) -> None:
    """Deletes what a failed save of this incarnation wrote; never raises. Nobody may still be writing there."""
    own = key_of(folder, f"{incarnation}-r")
    try:
        with suppress(ObjectNotFoundError):
            if f'"{incarnation}-r'.encode() in read_bounded(store, key_of(folder, MANIFEST_NAME), most_bytes=DOCUMENT_BYTES):
                # Training has stopped waiting for this save, and has committed the same step by itself.
                return
        for info in list(store.list(f"{ROOT}/{folder}")):
            if info.key.startswith(own):
                store.delete(info.key)
    except StorageError as error:
        logger.warning("the remnants of a failed save in %s could not be deleted yet: %s", folder, error)
