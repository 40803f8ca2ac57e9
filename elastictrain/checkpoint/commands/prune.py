"""`prune`: deletes old checkpoints by the rules of retention, once the newest one has been read and is whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.commands.output import note, plural, progress, result, size_text, table
from elastictrain.checkpoint.commands.survey import CheckpointState, RunLocation, Surveyed, list_folders, locate, survey
from elastictrain.checkpoint.commands.verify import read_and_judge
from elastictrain.checkpoint.folders import is_there, key_of
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.manifest import MANIFEST_NAME
from elastictrain.checkpoint.retention import Deletion, plan_retention
from elastictrain.errors import EXIT_OK, InvalidCheckpointError, NoValidCheckpointError, UsageError

Ask = Callable[[str], bool]
"""Puts a question to the person; whether the answer is yes."""


@dataclass(frozen=True, slots=True)
class KeepOptions:
    """What stays: the `last` newest, and all at multiples of `every` steps (0: none)."""

    last: int
    every: int


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What would go, oldest first, and the checkpoint that supersedes it."""

    newest: Surveyed
    folders: tuple[Surveyed, ...]
    deletions: tuple[Deletion, ...]
    off_line: frozenset[str]
    """Names of checkpoints that no start takes as long as there are others: see `lineage`."""

    def bytes_of(self, name: str) -> int:
        """Of all files in the folder `name`."""
        return sum(one.row.size_bytes for one in self.folders if one.name == name)


def prune_checkpoints(url: str, *, keep: KeepOptions, dry_run: bool, ask: Ask, threads: int, key_env: str = "") -> int:
    """Deletes what `keep` does not name; returns the exit code.

    Raises: UsageError; NoValidCheckpointError or InvalidCheckpointError if the newest one is not whole, and nothing is then
        deleted; StorageError, and what is then left half deleted is no checkpoint any more.
    """
    location = locate(url, key_env=key_env)
    if location.folder is not None:
        raise UsageError(f"prune takes the folder of a run, but {url} is one checkpoint")
    plan = plan_deletions(location, keep=keep)
    result(_text(plan, url=location.url))
    if dry_run or not plan.deletions:
        return EXIT_OK
    if not ask(f"delete {plural(len(plan.deletions), 'folder')}?"):
        note("nothing was deleted")
        return EXIT_OK
    _verify_newest(plan.newest, threads=threads)
    # The run may have saved and pruned meanwhile; only what the person has seen goes, and only if it still is to go.
    shown = {deletion.folder for deletion in plan.deletions}
    again = plan_deletions(location, keep=keep)
    if not any(one.name == plan.newest.name and one.state is CheckpointState.VALID for one in again.folders):
        raise InvalidCheckpointError(_refusal(plan.newest, "deleted or damaged meanwhile"))
    count = size_bytes = 0
    with progress("deleting", total=len(shown), unit="folder") as advance:
        for deletion in again.deletions:
            if deletion.folder in shown and delete_folder(location, deletion):
                count += 1
                size_bytes += again.bytes_of(deletion.folder)
            advance(1)
    result(f"deleted {plural(count, 'folder')}, {size_text(size_bytes)}")
    return EXIT_OK


def plan_deletions(location: RunLocation, *, keep: KeepOptions) -> PrunePlan:
    """What is to go now.

    Raises: NoValidCheckpointError; InvalidCheckpointError if the newest is damaged; UnknownFormatError; StorageError.
    """
    folders = survey(location, list_folders(location))
    # A mark says that what a start would take is older.
    committed = [one for one in folders if one.state not in (CheckpointState.UNCOMMITTED, CheckpointState.QUARANTINED)]
    off_line = _off_line(location, committed)
    newest = next((one for one in committed if one.name not in off_line), None)
    if newest is None:
        raise NoValidCheckpointError(f"{location.url} has no valid checkpoint; nothing is deleted")
    if newest.state is not CheckpointState.VALID:
        raise InvalidCheckpointError(_refusal(newest, f"{newest.state.value}: {newest.reason}"))
    deletions = plan_retention(
        [one.listed.facts for one in folders],
        newest=newest.name,
        intact={one.name for one in folders if one.state is CheckpointState.VALID} - off_line,
        keep_last=keep.last,
        keep_every=keep.every,
        unknown={one.name for one in folders if one.state in (CheckpointState.UNKNOWN, CheckpointState.UNTRUSTED)},
    )
    return PrunePlan(newest, folders, deletions, off_line)


def _off_line(location: RunLocation, committed: Sequence[Surveyed]) -> frozenset[str]:
    """Those off the line that the run took; none where nothing else is left, since a start takes them then."""
    _, off_line = Lineage(location.run).line_first(one.listed.facts for one in committed)
    return off_line if len(off_line) < len(committed) else frozenset()


def _refusal(newest: Surveyed, why: str) -> str:
    return f"{newest.url} is the newest checkpoint and must be whole before older ones go, but is {why}; nothing was deleted"


def _verify_newest(newest: Surveyed, *, threads: int) -> None:
    size_bytes = 0 if newest.manifest is None else newest.manifest.size_bytes
    note(f"reading {newest.name} ({size_text(size_bytes)}): older ones go only if every byte of it has its digest")
    with progress("verifying", total=size_bytes, unit="B") as advance:
        (verdict,) = read_and_judge([newest], threads=threads, advance=advance)
    if verdict.gone:
        raise InvalidCheckpointError(_refusal(newest, "deleted meanwhile"))
    if verdict.bad_files:
        file = verdict.bad_files[0]
        raise InvalidCheckpointError(_refusal(newest, f"damaged: {file.name}: {file.problems[0]}"))


def delete_folder(location: RunLocation, deletion: Deletion) -> bool:
    """Whether the folder was deleted; it is not if it has become a checkpoint since it was listed. Raises: StorageError."""
    run = location.run
    if MANIFEST_NAME not in deletion.files and is_there(run, key_of(deletion.folder, MANIFEST_NAME)):
        note(f"{deletion.folder} is not deleted: it has a manifest that was not listed")
        return False
    for file in deletion.files:
        run.delete(key_of(deletion.folder, file))
    return True


def _text(plan: PrunePlan, *, url: str) -> str:
    if not plan.deletions:
        return f"{url}\n  nothing to delete"
    rows = [
        (deletion.folder, size_text(plan.bytes_of(deletion.folder)), _what(deletion.folder, plan))
        for deletion in plan.deletions
    ]
    total = sum(plan.bytes_of(deletion.folder) for deletion in plan.deletions)
    left = plural(len(plan.folders) - len(plan.deletions), "folder")
    end = f"{plural(len(rows), 'folder')}, {size_text(total)}; left: {left}, newest checkpoint {plan.newest.name}"
    return f"{url}\n{table(('to delete', 'size', 'what'), rows, right=('size',))}\n{end}"


def _what(name: str, plan: PrunePlan) -> str:
    if name in plan.off_line:
        return "others went on without it"
    state = next(one.state for one in plan.folders if one.name == name)
    return {CheckpointState.VALID: "checkpoint", CheckpointState.UNCOMMITTED: "remnant of a save"}.get(state, state.value)
