"""Which checkpoints are deleted after a save. Pure.

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

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.folders import QUARANTINE_NAME, FolderFacts
from elastictrain.checkpoint.manifest import MANIFEST_NAME


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
    """Deletions, oldest first. `newest` is verified; `intact` names folders whose manifest and files check out.

    `unknown` names folders of a format that this release does not read.
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
            deletions.append(Deletion(folder.name, deletion_order(folder.files), folder.name in valid_names))
    return tuple(deletions)


def deletion_order(files: Collection[str]) -> tuple[str, ...]:
    """The manifest first, the quarantine mark last."""
    rank = {MANIFEST_NAME: 0, QUARANTINE_NAME: 2}
    return tuple(sorted(files, key=lambda name: (rank.get(name, 1), name)))
