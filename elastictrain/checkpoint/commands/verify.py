"""`verify`: reads every byte of checkpoints and says which files are damaged."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from elastictrain.checkpoint.commands.file_check import check_file
from elastictrain.checkpoint.commands.location import Location, locate
from elastictrain.checkpoint.commands.rows import State
from elastictrain.checkpoint.commands.selection import say_unchecked
from elastictrain.checkpoint.commands.speaking import Advance, note, progress, result, result_json
from elastictrain.checkpoint.commands.survey import Listed, Surveyed, list_folders, survey
from elastictrain.checkpoint.commands.texts import plural, size_text
from elastictrain.checkpoint.folders import key_of
from elastictrain.checkpoint.manifest import MANIFEST_NAME, FileRecord, JsonValue
from elastictrain.checkpoint.second_look import is_there
from elastictrain.checkpoint.shard_header import chunks_by_file
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, NoValidCheckpointError, UsageError

_SHOWN_PER_FILE = 4


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file of a checkpoint, and all that is wrong with it."""

    name: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One checkpoint after all its bytes were read. `reason` says what its manifest or its mark show; `gone`: it was deleted
    while it was read."""

    checked: Surveyed
    state: State
    reason: str
    bad_files: tuple[BadFile, ...] = ()
    gone: bool = False

    @property
    def size_bytes(self) -> int:
        """Of its shard files."""
        return 0 if self.checked.manifest is None else self.checked.manifest.size_bytes


def verify_checkpoints(url: str, *, every: bool, step: int | None, threads: int, as_json: bool, key_env: str = "") -> int:
    """Verifies the newest checkpoint at `url`, that of `step` or `every` one; returns the exit code.

    Raises: UsageError; NoValidCheckpointError if there is none; StorageError.
    """
    location = locate(url, key_env=key_env)
    if location.folder is not None and (every or step is not None):
        raise UsageError(f"--all and --step must go with the folder of a run, but {url} is one checkpoint")
    chosen = survey(location, choose_folders(list_folders(location), every=every, step=step, name=location.folder))
    for one in chosen:
        if one.manifest is not None:
            say_unchecked(one.manifest, name=one.name, signing=location.signing)
    total = sum(one.manifest.size_bytes for one in chosen if one.manifest is not None)
    with progress("verifying", total=total, unit="B") as advance:
        verdicts = read_and_judge(chosen, threads=threads, advance=advance)
    judged = [verdict for verdict in verdicts if not verdict.gone]
    for verdict in verdicts:
        if verdict.gone:
            note(f"{verdict.checked.name} was deleted while it was read")
    if not judged:
        which = "" if step is None else f" of step {step}"
        what = f"{location.folder} as a checkpoint" if location.folder else f"a checkpoint{which}"
        raise NoValidCheckpointError(f"{location.url} must hold {what}, but does not{_hint(location)}")
    if as_json:
        result_json({"url": location.url, "checkpoints": [_document(verdict) for verdict in judged]})
    else:
        result("\n".join([location.url, *(_text(verdict) for verdict in judged)]))
    return EXIT_OK if all(verdict.state is State.VALID for verdict in judged) else EXIT_STORAGE


def choose_folders(folders: Sequence[Listed], *, every: bool, step: int | None, name: str | None) -> tuple[Listed, ...]:
    """The committed folders that are asked for; without a wish the newest that a start would consider. Pure."""
    committed = [one for one in folders if one.facts.has_manifest]
    if every:
        return tuple(committed)
    if name is not None:
        return tuple(one for one in committed if one.facts.name == name)
    wanted = [one for one in committed if step is None or one.facts.step == step]
    considered = [one for one in wanted if not one.facts.quarantined]
    return tuple(considered[:1] or wanted[:1])


def read_and_judge(chosen: Sequence[Surveyed], *, threads: int, advance: Advance) -> list[Verdict]:
    """Reads all files of the chosen ones, `threads` at once; memory is bounded by 16 MiB for each thread.

    Raises: StorageError.
    """
    stopped = Event()
    jobs: list[tuple[Surveyed, FileRecord]] = []
    placed = {}
    for one in chosen:
        if one.manifest is not None:
            jobs += [(one, file) for file in one.manifest.files]
            placed[one.name] = chunks_by_file(one.manifest)

    def check(job: tuple[Surveyed, FileRecord]) -> tuple[str, ...]:
        one, file = job
        of_file = placed[one.name][file.name]
        return check_file(one.run, key_of(one.name, file.name), file=file, placed=of_file, advance=advance, stopped=stopped)

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            found = list(pool.map(check, jobs))
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    bad: dict[str, list[BadFile]] = {}
    for (one, file), problems in zip(jobs, found, strict=True):
        if problems:
            bad.setdefault(one.name, []).append(BadFile(file.name, problems))
    return [_judge(one, bad_files=tuple(bad.get(one.name, ()))) for one in chosen]


def _judge(one: Surveyed, *, bad_files: tuple[BadFile, ...]) -> Verdict:
    if bad_files and not is_there(one.run, key_of(one.name, MANIFEST_NAME)):
        # Retention of a run that is training takes the manifest first.
        return Verdict(one, one.state, one.reason, bad_files, gone=True)
    if one.state is State.VALID and bad_files:
        return Verdict(one, State.DAMAGED, "", bad_files)
    # Files that are missing or too short were seen by the survey, too: what reading them tells is more.
    reason = "" if one.state is State.DAMAGED and bad_files else one.reason
    return Verdict(one, one.state, reason, bad_files)


def _hint(location: Location) -> str:
    steps = sorted({one.facts.step for one in list_folders(location) if one.facts.has_manifest})
    return f"; there is step {', '.join(map(str, steps))}" if steps else ""


def _document(verdict: Verdict) -> JsonValue:
    bad: list[JsonValue] = [{"name": file.name, "problems": list(file.problems)} for file in verdict.bad_files]
    return {
        "name": verdict.checked.name,
        "step": verdict.checked.listed.facts.step,
        "state": verdict.state.value,
        "reason": verdict.reason,
        "bytes": verdict.size_bytes,
        "bad_files": bad,
    }


def _text(verdict: Verdict) -> str:
    manifest = verdict.checked.manifest
    lines = [f"  {verdict.checked.name}  {verdict.state.value}{f': {verdict.reason}' if verdict.reason else ''}"]
    if verdict.state is State.VALID and manifest is not None:
        read = f"{size_text(manifest.size_bytes)} in {plural(len(manifest.files), 'file')}"
        lines[0] += f"  ({read}, {plural(len(manifest.tensors), 'tensor')}: every byte has its digest)"
    elif manifest is not None and not verdict.bad_files:
        lines.append(f"    all of its {plural(len(manifest.files), 'file')} have their digests")
    for file in verdict.bad_files:
        lines += [f"    {file.name}: {problem}" for problem in file.problems[:_SHOWN_PER_FILE]]
        if len(file.problems) > _SHOWN_PER_FILE:
            lines.append(f"    {file.name}: and {len(file.problems) - _SHOWN_PER_FILE} more")
    return "\n".join(lines)
