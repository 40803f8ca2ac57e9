"""Checkpoint folders: their names, and what a listing alone says about them. Pure, and free of torch."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import MANIFEST_NAME
from elastictrain.storage.store import ObjectInfo

ROOT = "checkpoints"
QUARANTINE_NAME = "quarantine.json"
BEGUN_KEY = f"{ROOT}/begun.json"
"""Present from a fresh start until the first checkpoint of the run is committed: folders without a manifest are then the
remnants of a first save that was killed, and not checkpoints that lost their manifest."""
COMMITTED_KEY = f"{ROOT}/committed.json"
"""Present from the first commit of the run on: an empty folder is then the loss of all checkpoints, and no new run."""
RUN_COMMITTED_KEY = "committed.json"
"""The same beside the folder of checkpoints, for the case that this folder is lost as a whole."""

_FOLDER = re.compile(r"step-(\d{9,})(?:-([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """One folder, as listed. `files` maps names to sizes in bytes, marks and manifest included; subfolders are not ours."""

    name: str
    step: int
    attempt: int
    files: dict[str, int]

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


def folder_name(step: int, *, attempt: int = 1) -> str:
    """`step-000000400`, and `step-000000400-2` for the second attempt at the same step."""
    return f"step-{step:09d}" if attempt == 1 else f"step-{step:09d}-{attempt}"


def key_of(folder: str, file: str) -> str:
    """The key of a file in the store of a run."""
    return f"{ROOT}/{folder}/{file}"


def read_listing(infos: Iterable[ObjectInfo]) -> Listing:
    """Sorts the objects below `ROOT` into folders; objects that are not ours are left out."""
    found: dict[str, FolderFacts] = {}
    begun = committed = False
    for info in infos:
        begun = begun or info.key == BEGUN_KEY
        committed = committed or info.key == COMMITTED_KEY
        root, _, rest = info.key.partition("/")
        folder, slash, file = rest.partition("/")
        match = _FOLDER.fullmatch(folder)
        if root == ROOT and slash and "/" not in file and match is not None:
            facts = found.setdefault(folder, FolderFacts(folder, int(match[1]), int(match[2] or 1), {}))
            facts.files[file] = info.size_bytes
    return Listing(tuple(sorted(found.values(), key=lambda facts: facts.order, reverse=True)), begun, committed)


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a save goes, and what must be deleted there first."""

    folder: str
    stale_files: tuple[str, ...]


def choose_target(folders: Sequence[FolderFacts], *, step: int, committed: Collection[str] = ()) -> SaveTarget:
    """The first attempt at `step` whose folder is free: not there, or the remnant of a save that was never committed.

    `committed` names folders whose manifest the listing does not show, or that are not free for another reason.
    """
    listed = {folder.name: folder for folder in folders if folder.step == step}
    attempt = 1
    while (name := folder_name(step, attempt=attempt)) in committed or (
        (facts := listed.get(name)) and (facts.has_manifest or facts.quarantined)
    ):
        attempt += 1
    return SaveTarget(name, tuple(sorted(listed[name].files)) if name in listed else ())
