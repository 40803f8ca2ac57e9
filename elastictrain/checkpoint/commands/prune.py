"""`prune`: delete old checkpoints by the rules of `retention`, after every byte of the newest one is verified."""

from dataclasses import dataclass

from elastictrain.checkpoint.commands.output import ask, can_ask, note, plural, result, size_text, table
from elastictrain.checkpoint.commands.survey import CheckpointState, RunLocation, Surveyed, locate, survey
from elastictrain.checkpoint.commands.verify import read_and_judge
from elastictrain.checkpoint.evaluations import read_evaluations
from elastictrain.checkpoint.folders import list_checkpoints
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.retention import Deletion, delete_folder, plan_retention
from elastictrain.checkpoint.verified_read import READ_THREADS
from elastictrain.entry_point import progress
from elastictrain.errors import EXIT_OK, InvalidCheckpointError, NoValidCheckpointError, UsageError

_STATES_LEFT_ALONE = (CheckpointState.UNKNOWN, CheckpointState.UNTRUSTED)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What is to be deleted, oldest first, and the checkpoint that supersedes it."""

    newest: Surveyed
    folders: dict[str, Surveyed]
    deletions: tuple[Deletion, ...]
    off_lineage: frozenset[str]  # checkpoints off the lineage of the run, which no start takes while others exist

    def bytes_of(self, name: str) -> int:
        return sum(self.folders[name].facts.files.values())


def prune_checkpoints(
    url: str,
    *,
    keep_last: int,
    keep_every: int,
    dry_run: bool = False,
    yes: bool = False,
    key_env: str = "",
) -> int:
    """Delete all but the `keep_last` newest, those at multiples of `keep_every` steps (0: none) and those of the best
    evaluations; `ask` first, unless `yes`.

    Raises: UsageError; NoValidCheckpointError or InvalidCheckpointError, with nothing deleted, if the newest one is not valid;
    StorageError, after which a half deleted folder is no checkpoint any more.
    """
    if not (yes or dry_run or can_ask()):
        raise UsageError("prune asks before it deletes, and there is no terminal to ask on; give --yes, or --dry-run")
    location = locate(url, key_env=key_env)
    if location.folder is not None:
        raise UsageError(f"prune takes the folder of a run, but {url} is one checkpoint")
    plan = plan_deletions(location, keep_last=keep_last, keep_every=keep_every)
    result(_text(plan, url=location.url))
    if dry_run or not plan.deletions:
        return EXIT_OK
    if not yes and not ask(f"delete {plural(len(plan.deletions), 'folder')}?"):
        note("nothing was deleted")
        return EXIT_OK
    _verify_newest(plan.newest)
    # The run may have saved and pruned meanwhile. Only what was shown is deleted, and only if the new plan has it, too.
    shown = {deletion.folder for deletion in plan.deletions}
    again = plan_deletions(location, keep_last=keep_last, keep_every=keep_every)
    newest = again.folders.get(plan.newest.name)
    if newest is None or newest.state is not CheckpointState.VALID:
        raise InvalidCheckpointError(_refusal(plan.newest, "deleted or damaged meanwhile"))
    count = size_bytes = 0
    with progress("deleting", len(shown), unit="folder") as advance:
        for deletion in again.deletions:
            if deletion.folder in shown and delete_folder(location.run, deletion):
                count += 1
                size_bytes += again.bytes_of(deletion.folder)
            advance(1)
    result(f"deleted {plural(count, 'folder')}, {size_text(size_bytes)}")
    return EXIT_OK


def plan_deletions(location: RunLocation, *, keep_last: int, keep_every: int) -> PrunePlan:
    """Raises: NoValidCheckpointError; InvalidCheckpointError if the newest is not valid; StorageError."""
    folders = survey(location, list_checkpoints(location.run).folders)
    # A start takes no quarantined one.
    committed = [one for one in folders if one.state not in (CheckpointState.UNCOMMITTED, CheckpointState.QUARANTINED)]
    _, off_lineage = Lineage(location.run).lineage_first(one.facts for one in committed)
    if len(off_lineage) == len(committed):
        # No others are left, so a start takes these.
        off_lineage = frozenset()
    newest = next((one for one in committed if one.name not in off_lineage), None)
    if newest is None:
        raise NoValidCheckpointError(f"{location.url} has no valid checkpoint; nothing is deleted")
    if newest.state is not CheckpointState.VALID:
        raise InvalidCheckpointError(_refusal(newest, f"{newest.state.value}: {newest.reason}"))
    deletions = plan_retention(
        [one.facts for one in folders],
        newest=newest.name,
        intact={one.name for one in folders if one.state is CheckpointState.VALID} - off_lineage,
        keep_last=keep_last,
        keep_every=keep_every,
        best=read_evaluations(location.run).best,
        unknown={one.name for one in folders if one.state in _STATES_LEFT_ALONE},
    )
    return PrunePlan(newest, {one.name: one for one in folders}, deletions, off_lineage)


def _refusal(newest: Surveyed, why: str) -> str:
    return f"{newest.url} is the newest checkpoint and must be whole before older ones go, but is {why}; nothing was deleted"


def _verify_newest(newest: Surveyed) -> None:
    size_bytes = newest.shard_bytes
    note(f"reading {newest.name} ({size_text(size_bytes)}): older ones go only if every byte of it has its digest")
    with progress("verifying", size_bytes) as advance:
        (verdict,) = read_and_judge([newest], threads=READ_THREADS, advance=advance)
    if verdict.gone:
        raise InvalidCheckpointError(_refusal(newest, "deleted meanwhile"))
    if verdict.bad_files:
        name, problems = next(iter(verdict.bad_files.items()))
        raise InvalidCheckpointError(_refusal(newest, f"damaged: {name}: {problems[0]}"))


def _text(plan: PrunePlan, *, url: str) -> str:
    if not plan.deletions:
        return f"{url}\n  nothing to delete"
    rows = []
    for name in (deletion.folder for deletion in plan.deletions):
        state = plan.folders[name].state
        names = {CheckpointState.VALID: "checkpoint", CheckpointState.UNCOMMITTED: "remnant of a save"}
        what = "others continued without it" if name in plan.off_lineage else names.get(state, state.value)
        rows.append((name, size_text(plan.bytes_of(name)), what))
    left = plural(len(plan.folders) - len(rows), "folder")
    total = size_text(sum(plan.bytes_of(deletion.folder) for deletion in plan.deletions))
    end = f"{plural(len(rows), 'folder')}, {total}; left: {left}, newest checkpoint {plan.newest.name}"
    return f"{url}\n{table(('to delete', 'size', 'what'), rows, right=('size',))}\n{end}"
