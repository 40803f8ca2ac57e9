"""Checkpoint folders of a run: names, listing, the markers of the run, and the target of a save. Free of torch.

`begun.json` and `committed.json` mark the whole run; a copy of `committed.json` lies in the run folder. If both exist, the run
has committed: it was killed before it deleted `begun.json`.
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
"""Exists from a fresh start until the first commit: folders without a manifest are then remnants of a first save that was
killed, and not checkpoints that lost their manifest."""
COMMITTED_KEY = f"{ROOT}/committed.json"  # exists from the first commit on: an empty folder then means lost checkpoints
RUN_COMMITTED_KEY = "committed.json"  # the copy in the run folder, in case all of `checkpoints/` is lost
FOLDER_NAME = re.compile(r"step-(\d{9,})(?:-([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """One listed folder. `files` maps names to sizes in bytes, with markers and manifest, without subfolders."""

    name: str
    step: int
    attempt: int
    files: dict[str, int]
    modified: float = 0.0  # of its newest file, unix seconds

    @property
    def has_manifest(self) -> bool:
        return MANIFEST_NAME in self.files

    @property
    def quarantined(self) -> bool:
        return QUARANTINE_NAME in self.files

    @property
    def order(self) -> tuple[int, int]:
        """Greater is newer."""
        return (self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Listing:
    """All checkpoint folders, newest first, and which markers of the run exist."""

    folders: tuple[FolderFacts, ...]
    begun: bool
    committed: bool = False

    def folder(self, name: str) -> FolderFacts | None:
        return next((folder for folder in self.folders if folder.name == name), None)


@dataclass(frozen=True, slots=True)
class Reject:
    """A folder that a start passes over, and why; `file` is the damaged or missing one, if known."""

    folder: str
    file: str | None
    reason: str
    lasting: bool = True  # False: only the signing key may be wrong, so a later start tries the folder again

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


def folder_name(step: int, *, attempt: int = 1) -> str:
    """`step-000000400`; `step-000000400-2` is the second attempt at the same step."""
    return f"step-{step:09d}" if attempt == 1 else f"step-{step:09d}-{attempt}"


def key_of(folder: str, file: str) -> str:
    return f"{ROOT}/{folder}/{file}"


def list_checkpoints(store: Store) -> Listing:
    """Raises: StorageError."""
    return read_listing(store.list(ROOT))


def read_listing(infos: Iterable[ObjectInfo]) -> Listing:
    """Group the objects below `ROOT` by checkpoint folder; ignore all other objects. Pure."""
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
    """Whether the store has the object, or a file system anything else of that name. Raises: StorageError."""
    try:
        return exists(store, key)
    except IrregularFileError:
        return True


def clear_target(store: Store, listing: Listing, *, step: int, at_work: str | None = None) -> str:
    """Choose the folder for `step` and delete its files: the first attempt that does not exist or was never committed.

    A folder with files of the incarnation `at_work` is not used, nor one that is a link or whose manifest is one.
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
    # A hung saver may still write there, under the names of this incarnation's files.
    if at_work is not None and any(file.startswith(f"{at_work}-r") for file in facts.files):
        return True
    # A previous generation that has not ended yet may have committed it since the listing.
    return is_there(store, manifest)


def discard_files(store: Store, folder: str, *, incarnation: str) -> None:
    """Delete what a failed save of this incarnation wrote; never raises. No process may still write there."""
    own = key_of(folder, f"{incarnation}-r")
    try:
        with suppress(ObjectNotFoundError):
            if f'"{incarnation}-r'.encode() in read_bounded(store, key_of(folder, MANIFEST_NAME), max_bytes=DOCUMENT_BYTES):
                # The trainer stopped waiting for this save and committed the same step itself.
                return
        for info in list(store.list(f"{ROOT}/{folder}")):
            if info.key.startswith(own):
                store.delete(info.key)
    except StorageError as error:
        logger.warning("the remnants of a failed save in %s could not be deleted yet: %s", folder, error)


def mark_begun(store: Store, *, listing: Listing, note: Mapping[str, JsonValue]) -> None:
    """Record that the run starts from step 0 and has committed nothing. Raises: StorageError."""
    # This first: a start killed in between then leaves no `begun.json`, which would excuse lost checkpoints.
    if listing.committed:
        store.delete(COMMITTED_KEY)
    if not listing.begun:
        store.delete(RUN_COMMITTED_KEY)
        store.write(BEGUN_KEY, encode_mark(note))


def mark_committed(store: Store, *, listing: Listing, note: Mapping[str, JsonValue]) -> None:
    """Record that the run has a checkpoint. A storage failure is only logged: the next save tries again."""
    try:
        if not listing.committed:
            # In this order: where `COMMITTED_KEY` exists, both exist.
            store.write(RUN_COMMITTED_KEY, encode_mark(note))
            store.write(COMMITTED_KEY, encode_mark(note))
        if listing.begun:
            store.delete(BEGUN_KEY)
    except StorageError as error:
        logger.warning("cannot record yet that the run has a checkpoint: %s", error)


def encode_mark(note: Mapping[str, JsonValue]) -> bytes:
    return json.dumps(dict(note), indent=1).encode() + b"\n"


def quarantine_reason(store: Store, folder: str) -> str:
    try:
        mark = parse_json(read_bounded(store, key_of(folder, QUARANTINE_NAME)))
    except (ValueError, StorageError) as error:
        return f"its mark cannot be read ({error})"
    reason = mark.get("reason") if isinstance(mark, dict) else None
    return reason if isinstance(reason, str) else "its mark gives no reason"
