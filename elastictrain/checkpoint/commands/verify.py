"""`verify`: reads every byte of checkpoints and says which files are damaged."""

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import xxhash

from elastictrain.checkpoint.commands.output import Advance, note, plural, progress, result, result_json, size_text
from elastictrain.checkpoint.commands.survey import (
    CheckpointState,
    ListedFolder,
    RunLocation,
    Surveyed,
    list_folders,
    locate,
    say_unchecked,
    survey,
)
from elastictrain.checkpoint.folders import is_there, key_of
from elastictrain.checkpoint.layout import PlacedChunk, check_shard_header, chunks_by_file
from elastictrain.checkpoint.manifest import MANIFEST_NAME, FileRecord, JsonValue
from elastictrain.checkpoint.verified_read import READ_BYTES
from elastictrain.errors import (
    EXIT_OK,
    EXIT_STORAGE,
    InvalidCheckpointError,
    IrregularFileError,
    NoValidCheckpointError,
    ObjectNotFoundError,
    UsageError,
)
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_SHA256_DIGITS = 64


class _Hash(Protocol):
    """A digest in the making."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class DigestedRange:
    """Bytes [start, end) of a file, the digest that they must have (xxh3_128 or, if it is longer, SHA-256), and what they
    are."""

    start: int
    end: int
    digest: str
    what: str


def ranges_of(file: FileRecord, placed: Sequence[PlacedChunk]) -> tuple[DigestedRange, ...]:
    """The header of a file and the chunks of tensors in it, in the order of their bytes."""
    found = [
        DigestedRange(0, file.header_bytes, digest, "its header")
        for digest in (file.header_digest, file.header_sha256)
        if digest
    ]
    for one in placed:
        start, end = one.chunk.start, one.chunk.start + one.chunk.size_bytes
        for digest in (one.chunk.digest, one.chunk.sha256):
            if start < end and digest:
                found.append(DigestedRange(start, end, digest, f"{one.name} in bytes [{start}, {end})"))
    return tuple(found)


class RangeDigests:
    """Digests ranges of a stream of bytes while it goes by; they may overlap."""

    def __init__(self, ranges: Sequence[DigestedRange]) -> None:
        """`ranges` in the order of their starts."""
        self._waiting = list(reversed(ranges))
        self._open: list[tuple[DigestedRange, _Hash]] = []
        self._position = 0
        self.wrong: list[DigestedRange] = []
        """Ranges that have gone by with another digest."""

    def update(self, piece: memoryview) -> None:
        """The next bytes of the stream."""
        begin, end = self._position, self._position + len(piece)
        self._position = end
        while self._waiting and self._waiting[-1].start < end:
            one = self._waiting.pop()
            self._open.append((one, hashlib.sha256() if len(one.digest) == _SHA256_DIGITS else xxhash.xxh3_128()))
        still_open = []
        for one, digest in self._open:
            digest.update(piece[max(one.start, begin) - begin : min(one.end, end) - begin])
            if one.end > end:
                still_open.append((one, digest))
            elif digest.hexdigest() != one.digest:
                self.wrong.append(one)
        self._open = still_open


def check_file(
    store: Store, key: str, *, file: FileRecord, placed: Sequence[PlacedChunk], advance: Advance, stopped: Event
) -> tuple[str, ...]:
    """What is wrong with the file at `key`, a sentence each; it is read again before anything is.

    `placed` is what the manifest has in the file, in the order of the bytes. Memory: `READ_BYTES`, and the header.

    Raises: StorageError.
    """
    first = _look(store, key, file=file, placed=placed, advance=advance, stopped=stopped)
    if not first:
        return ()
    second = _look(store, key, file=file, placed=placed, advance=lambda _: None, stopped=stopped)
    if not second:
        logger.warning("%s read wrong once, and right again: %s", f"{store.url}/{key}", first[0])
        return ()
    lasting = tuple(problem for problem in second if problem in first)
    # What is damaged in the store stays where it is.
    return lasting or (f"reads differently each time, as if the way to this machine garbled it: {first[0]}, then {second[0]}",)


def _look(
    store: Store, key: str, *, file: FileRecord, placed: Sequence[PlacedChunk], advance: Advance, stopped: Event
) -> tuple[str, ...]:
    digests, whole, head = RangeDigests(ranges_of(file, placed)), xxhash.xxh3_128(), bytearray()
    try:
        size_bytes = store.stat(key).size_bytes
        if size_bytes != file.size_bytes:
            return (f"must have {file.size_bytes} bytes, but has {size_bytes}",)
        buffer = memoryview(bytearray(min(READ_BYTES, file.size_bytes)))
        done = 0
        while done < file.size_bytes and not stopped.is_set():
            piece = buffer[: file.size_bytes - done]
            count = store.read_into(key, piece, start=done)
            if count < len(piece):
                return (f"ends at byte {done + count}, too early",)
            whole.update(piece)
            digests.update(piece)
            head += piece[: max(0, file.header_bytes - done)]
            done += count
            advance(count)
    except ObjectNotFoundError:
        return ("is gone",)
    except IrregularFileError as error:
        return (str(error),)
    if stopped.is_set():
        return ()
    if whole.hexdigest() == file.digest and not digests.wrong:
        return _header_problems(bytes(head), file=file, placed=placed)
    wrong = tuple(f"{one.what} does not have its digest" for one in digests.wrong)
    return wrong or ("does not have its digest, although its header and all tensors in it have theirs",)


def _header_problems(head: bytes, *, file: FileRecord, placed: Sequence[PlacedChunk]) -> tuple[str, ...]:
    try:
        check_shard_header(head, file=file, chunks=placed, where="its header")
    except InvalidCheckpointError as error:
        return (str(error),)
    return ()


_SHOWN_PER_FILE = 4


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file of a checkpoint, and all that is wrong with it."""

    name: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """One checkpoint after all its bytes were read. `reason` says what its manifest or its mark show; `gone`: it was deleted
    while it was read."""

    checked: Surveyed
    state: CheckpointState
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
    return EXIT_OK if all(verdict.state is CheckpointState.VALID for verdict in judged) else EXIT_STORAGE


def choose_folders(
    folders: Sequence[ListedFolder], *, every: bool, step: int | None, name: str | None
) -> tuple[ListedFolder, ...]:
    """The committed folders that are asked for; without a wish the newest that a start would consider. Pure."""
    committed = [one for one in folders if one.facts.has_manifest]
    if every:
        return tuple(committed)
    if name is not None:
        return tuple(one for one in committed if one.facts.name == name)
    wanted = [one for one in committed if step is None or one.facts.step == step]
    considered = [one for one in wanted if not one.facts.quarantined]
    return tuple(considered[:1] or wanted[:1])


def read_and_judge(chosen: Sequence[Surveyed], *, threads: int, advance: Advance) -> list[VerifyResult]:
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


def _judge(one: Surveyed, *, bad_files: tuple[BadFile, ...]) -> VerifyResult:
    if bad_files and not is_there(one.run, key_of(one.name, MANIFEST_NAME)):
        # Retention of a run that is training takes the manifest first.
        return VerifyResult(one, one.state, one.reason, bad_files, gone=True)
    if one.state is CheckpointState.VALID and bad_files:
        return VerifyResult(one, CheckpointState.DAMAGED, "", bad_files)
    # Files that are missing or too short were seen by the survey, too: what reading them tells is more.
    reason = "" if one.state is CheckpointState.DAMAGED and bad_files else one.reason
    return VerifyResult(one, one.state, reason, bad_files)


def _hint(location: RunLocation) -> str:
    steps = sorted({one.facts.step for one in list_folders(location) if one.facts.has_manifest})
    return f"; there is step {', '.join(map(str, steps))}" if steps else ""


def _document(verdict: VerifyResult) -> JsonValue:
    bad: list[JsonValue] = [{"name": file.name, "problems": list(file.problems)} for file in verdict.bad_files]
    return {
        "name": verdict.checked.name,
        "step": verdict.checked.listed.facts.step,
        "state": verdict.state.value,
        "reason": verdict.reason,
        "bytes": verdict.size_bytes,
        "bad_files": bad,
    }


def _text(verdict: VerifyResult) -> str:
    manifest = verdict.checked.manifest
    lines = [f"  {verdict.checked.name}  {verdict.state.value}{f': {verdict.reason}' if verdict.reason else ''}"]
    if verdict.state is CheckpointState.VALID and manifest is not None:
        read = f"{size_text(manifest.size_bytes)} in {plural(len(manifest.files), 'file')}"
        lines[0] += f"  ({read}, {plural(len(manifest.tensors), 'tensor')}: every byte has its digest)"
    elif manifest is not None and not verdict.bad_files:
        lines.append(f"    all of its {plural(len(manifest.files), 'file')} have their digests")
    for file in verdict.bad_files:
        lines += [f"    {file.name}: {problem}" for problem in file.problems[:_SHOWN_PER_FILE]]
        if len(file.problems) > _SHOWN_PER_FILE:
            lines.append(f"    {file.name}: and {len(file.problems) - _SHOWN_PER_FILE} more")
    return "\n".join(lines)
