"""The marks of a run as a whole: `begun.json` and `committed.json`, this one in the run folder, too.

`committed.json` outweighs `begun.json`: where both are, the run has committed, and was killed before it removed the other.
"""

import json
import logging
from collections.abc import Mapping

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.folders import BEGUN_KEY, COMMITTED_KEY, QUARANTINE_NAME, RUN_COMMITTED_KEY, Listing, key_of
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.errors import StorageError
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


def mark_begun(store: Store, *, listing: Listing, note: Mapping[str, JsonValue]) -> None:
    """A run starts from step 0, and has committed nothing. Raises: StorageError."""
    # First: a start that ends in between leaves nothing that would excuse lost checkpoints.
    if listing.committed:
        store.delete(COMMITTED_KEY)
    if not listing.begun:
        store.delete(RUN_COMMITTED_KEY)
        store.write(BEGUN_KEY, encode_mark(note))


def mark_committed(store: Store, *, listing: Listing, note: Mapping[str, JsonValue]) -> None:
    """The run has a checkpoint. A store that fails is no error: the next save tries again."""
    try:
        if not listing.committed:
            # First: where the other one is, both are.
            store.write(RUN_COMMITTED_KEY, encode_mark(note))
            store.write(COMMITTED_KEY, encode_mark(note))
        if listing.begun:
            store.delete(BEGUN_KEY)
    except StorageError as error:
        logger.warning("that the run has a checkpoint could not be noted yet: %s", error)


def mark_lost(store: Store, *, note: Mapping[str, JsonValue]) -> None:
    """The run has committed, and its checkpoints are gone: the next start finds that without a search. Never raises."""
    try:
        store.write(RUN_COMMITTED_KEY, encode_mark(note))
    except StorageError as error:
        logger.warning("that the run had checkpoints could not be noted: %s", error)


def encode_mark(note: Mapping[str, JsonValue]) -> bytes:
    """The bytes of a mark, for a person to read."""
    return json.dumps(dict(note), indent=1).encode() + b"\n"


def quarantine_reason(store: Store, folder: str) -> str:
    """What the start that quarantined a folder wrote down."""
    try:
        mark = parse_json(read_bounded(store, key_of(folder, QUARANTINE_NAME)))
    except (ValueError, StorageError) as error:
        return f"its mark cannot be read ({error})"
    reason = mark.get("reason") if isinstance(mark, dict) else None
    return reason if isinstance(reason, str) else "its mark gives no reason"
