"""Which checkpoint a start takes. Pure: from what is listed and what was rejected so far to a decision."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from elastictrain.checkpoint.folders import FolderFacts, Listing
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest


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


@dataclass(frozen=True, slots=True)
class TryFolder:
    """Try this folder."""

    folder: FolderFacts


@dataclass(frozen=True, slots=True)
class FreshStart:
    """Begin at step 0; `rejects` is what is passed over."""

    rejects: tuple[Reject, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not start: there were checkpoints, and none is valid."""

    rejects: tuple[Reject, ...]


def select_checkpoint(
    listing: Listing, *, rejected: Collection[Reject], on_invalid: Literal["stop", "fresh"]
) -> TryFolder | FreshStart | Refuse:
    """The newest committed folder that was not rejected, in this walk or by an earlier quarantine.

    Without one, a start from step 0 is right only where no checkpoint can have been lost: nothing is there and nothing was ever
    committed, or nothing is there but remnants of a first save (`Listing.begun`), or the person said so.
    """
    known = {reject.folder: reject for reject in rejected}
    rejects: list[Reject] = []
    for folder in listing.folders:
        if folder.name in known:
            rejects.append(known[folder.name])
        elif folder.quarantined:
            rejects.append(Reject(folder.name, None, "quarantined by an earlier start"))
        elif not folder.has_manifest:
            rejects.append(_uncommitted(folder))
        else:
            return TryFolder(folder)
    only_remnants = not rejected and all(not folder.quarantined for folder in listing.folders)
    never_committed = not listing.committed and (not rejects or (listing.begun and only_remnants))
    if never_committed or on_invalid == "fresh":
        return FreshStart(tuple(rejects))
    return Refuse(tuple(rejects))


@dataclass(frozen=True, slots=True, order=True)
class LineageStanding:
    """Of a state that a start may go on from; greater is better."""

    on_line: bool
    """A part of the history that the run went on with: all else counts only where nothing of it is left."""

    step: int


def prefers_memory(memory: LineageStanding | None, stored: LineageStanding | None) -> bool:
    """Whether the best step in host memory is tried before what storage offers: it is as good, or storage has nothing left."""
    return memory is not None and (stored is None or memory >= stored)


def passed_over(listing: Listing, *, chosen: str) -> tuple[Reject, ...]:
    """Folders newer than the chosen one that were never committed (or lost their manifest)."""
    newer = takewhile(lambda folder: folder.name != chosen, listing.folders)
    return tuple(_uncommitted(folder) for folder in newer if not folder.has_manifest and not folder.quarantined)


def missing_files(manifest: Manifest, folder: FolderFacts) -> Reject | None:
    """The first file of the manifest that the listing does not show, or shows in another size."""
    for file in manifest.files:
        size_bytes = folder.files.get(file.name)
        if size_bytes is None:
            return Reject(folder.name, file.name, f"{file.name} is gone")
        if size_bytes != file.size_bytes:
            return Reject(folder.name, file.name, f"{file.name} must have {file.size_bytes} bytes, but has {size_bytes}")
    return None


def refusal_message(rejects: Collection[Reject], *, url: str) -> str:
    """What a person reads when a run refuses to start."""
    if not rejects:
        return (
            f"{url} is of a run that had committed checkpoints (committed.json is there), and none is left.\n"
            "Restore one of them from a backup, or start over from step 0 with `checkpoint.on_invalid=fresh`."
        )
    lines = "\n".join(f"  - {reject}" for reject in rejects)
    return (
        f"{url} has {len(rejects)} checkpoint(s), and none is valid:\n{lines}\n"
        "Nothing was deleted. Restore one of them from a backup, or start over from step 0 with `checkpoint.on_invalid=fresh`."
    )


def _uncommitted(folder: FolderFacts) -> Reject:
    return Reject(folder.name, MANIFEST_NAME, f"{MANIFEST_NAME} is not there: the save was cut short, or the file was lost")
