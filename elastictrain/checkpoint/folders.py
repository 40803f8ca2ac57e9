"""The checkpoint folders of a run: their names, what a listing says about them, the run's marks, and where a save goes.

`begun.json` and `committed.json` mark the run as a whole, the second one in the run folder, too. `committed.json` outweighs
`begun.json`: where both are, the run has committed, and was killed before it removed the other. Free of torch.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.manifest import MANIFEST_NAME, JsonValue
from elastictrain.errors import IrregularFileError, ObjectNotFoundError, StorageError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, exists, read_bounded
from elastictrain.storage.opening import is_blocked
from elastictrain.storage.store import ObjectInfo, Store

logger = logging.getLogger(__name__)

ROOT = "checkpoints"
QUARANTINE_NAME = "quarantine.json"
BEGUN_KEY = f"{ROOT}/begun.json"
"""Present from a fresh start until the first checkpoint of the run is committed: folders without a manifest are then the
remnants of a first save that was killed, and not checkpoints that lost their manifest."""
COMMITTED_KEY = f"{ROOT}/committed.json"
"""Present from the first commit of the run on: an empty folder is then the loss of all checkpoints, and no new run."""
RUN_COMMITTED_KEY = "committed.json"
"""The same beside the folder of checkpoints, for the case that this folder is lost as a whole."""

FOLDER_NAME = re.compile(r"step-(\d{9,})(?:-([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """One folder, as listed. `files` maps names to sizes in bytes, marks and manifest included; subfolders are not ours."""

    name: str
    step: int
    attempt: int
    files: dict[str, int]
    modified: float = 0.0
    """When the newest of its files was written; unix seconds."""

    @property
    def has_manifest(self) -> bool:
        """Whether it was committed and its manifest is still there."""
        return MANIFEST_NAME in self.files

    @property
    def quarantined(self) -> bool:
        """Whether it was found to be damaged."""
        return QUARANTINE_NAME in self.files

    @property
    def order(self) -> tuple[int, int]:
        """Greater is newer."""
        return (self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Listing:
    """All checkpoint folders, newest first, and which marks of the run are there."""

    folders: tuple[FolderFacts, ...]
    begun: bool
    committed: bool = False

    def folder(self, name: str) -> FolderFacts | None:
        """The folder of that name, if it is there."""
        return next((folder for folder in self.folders if folder.name == name), None)


@dataclass(frozen=True, slots=True)
class Reject:
    """A folder that is not taken, and why; `file` names the culprit if there is one."""

    folder: str
    file: str | None
    reason: str
    lasting: bool = True
    """Whether a later start is not to look at it again. It is to where only the key may be the wrong one."""

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


def folder_name(step: int, *, attempt: int = 1) -> str:
    """`step-000000400`, and `step-000000400-2` for the second attempt at the same step."""
    return f"step-{step:09d}" if attempt == 1 else f"step-{step:09d}-{attempt}"


def key_of(folder: str, file: str) -> str:
    """The key of a file in the store of a run."""
    return f"{ROOT}/{folder}/{file}"


def list_checkpoints(store: Store) -> Listing:
    """All checkpoint folders of a run. Raises: StorageError."""
    return read_listing(store.list(ROOT))


def read_listing(infos: Iterable[ObjectInfo]) -> Listing:
    """Sorts the objects below `ROOT` into folders; objects that are not ours are left out. Pure."""
    found: dict[str, dict[str, ObjectInfo]] = {}
    begun = committed = False
    for info in infos:
        begun = begun or info.key == BEGUN_KEY
        committed = committed or info.key == COMMITTED_KEY
        root, _, rest = info.key.partition("/")
        folder, slash, file = rest.partition("/")
        if root == ROOT and slash and "/" not in file:
            found.setdefault(folder, {})[file] = info
    folders = []
    for name, files in found.items():
        if (match := FOLDER_NAME.fullmatch(name)) is not None:
            sizes = {file: info.size_bytes for file, info in files.items()}
            modified = max(info.modified for info in files.values())
            folders.append(FolderFacts(name, int(match[1]), int(match[2] or 1), sizes, modified))
    return Listing(tuple(sorted(folders, key=lambda facts: facts.order, reverse=True)), begun, committed)


def is_there(store: Store, key: str) -> bool:
    """Whether the store, asked for it, has the object, or a file system something else of that name. Raises: StorageError."""
    try:
        return exists(store, key)
    except IrregularFileError:
        return True


def clear_target(store: Store, listing: Listing, *, step: int, at_work: str | None = None) -> str:
    """The folder for `step`, now empty of files: the first attempt that is not there, or is the remnant of a save that was
    never committed. Files of the incarnation that is `at_work` are left alone.

    A folder that is a link, or whose manifest is one, is not used.

    Raises: StorageError.
    """
    attempt = 1
    while _is_taken(store, listing, name := folder_name(step, attempt=attempt), at_work=at_work):
        attempt += 1
    remnant = listing.folder(name)
    for file in sorted(remnant.files) if remnant is not None else ():
        store.delete(key_of(name, file))
    return name


def _is_taken(store: Store, listing: Listing, name: str, *, at_work: str | None) -> bool:
    facts, manifest = listing.folder(name), key_of(name, MANIFEST_NAME)
    if facts is not None and (facts.has_manifest or facts.quarantined):
        return True
    if is_blocked(store, manifest):
        return True
    if facts is None:
        return False
    # A saver that hangs may go on writing there, under the names that this incarnation's files have.
    if at_work is not None and any(file.startswith(f"{at_work}-r") for file in facts.files):
        return True
    # Committed since it was listed, by a predecessor that is not gone yet: these are the files of a checkpoint.
    return is_there(store, manifest)


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
        logger.warning("cannot record yet that the run has a checkpoint: %s", error)


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
