"""`verify` and `sign`: read every byte of checkpoints, report damaged files, and sign manifests."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import msgspec
import xxhash

from elastictrain import errors
from elastictrain.checkpoint.commands.output import note, plural, result, result_json, size_text
from elastictrain.checkpoint.commands.survey import CheckpointState, Surveyed, locate, note_unchecked, survey
from elastictrain.checkpoint.folders import ROOT, FolderFacts, is_there, key_of, list_checkpoints
from elastictrain.checkpoint.layout import PlacedChunk, check_shard_header, chunks_by_file
from elastictrain.checkpoint.manifest import MANIFEST_NAME, ChunkRecord, FileRecord, Manifest, has_digest, sha256_of
from elastictrain.checkpoint.manifest_format import encode_manifest
from elastictrain.checkpoint.manifest_parts import PART_SUFFIX
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import (
    READ_THREADS,
    CheckpointFolder,
    DamagedFileError,
    coalesced_reads,
    read_chunks,
    read_parts,
    wrong_chunks,
)
from elastictrain.entry_point import progress
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_SHOWN_PER_FILE = 4


def verify_checkpoints(url: str, *, every: bool, step: int | None, threads: int, as_json: bool, key_env: str = "") -> int:
    """Verify the newest one, that of `step`, or `every` one. Raises: UsageError; NoValidCheckpointError; StorageError."""
    location = locate(url, key_env=key_env)
    if location.folder is not None and (every or step is not None):
        raise errors.UsageError(f"--all and --step must go with the folder of a run, but {url} is one checkpoint")
    folders = list_checkpoints(location.run).folders
    chosen = survey(location, choose_folders(folders, every=every, step=step, name=location.folder))
    for one in chosen:
        if one.manifest is not None:
            note_unchecked(one.manifest, name=one.name, signing=location.signing)
    with progress("verifying", sum(one.shard_bytes for one in chosen)) as advance:
        verdicts = read_and_judge(chosen, threads=threads, advance=advance)
    judged = [verdict for verdict in verdicts if not verdict.gone]
    for verdict in verdicts:
        if verdict.gone:
            note(f"{verdict.name} was deleted while it was read")
    if not judged:
        raise errors.NoValidCheckpointError(location.missing_message(step))
    if as_json:
        documents = [
            {
                "name": verdict.name,
                "step": verdict.facts.step,
                "state": verdict.state.value,
                "reason": verdict.reason,
                "bytes": verdict.shard_bytes,
                "bad_files": [{"name": name, "problems": problems} for name, problems in verdict.bad_files.items()],
            }
            for verdict in judged
        ]
        result_json({"url": location.url, "checkpoints": documents})
    else:
        result("\n".join([location.url, *(_text(verdict) for verdict in judged)]))
    return errors.EXIT_OK if all(verdict.state is CheckpointState.VALID for verdict in judged) else errors.EXIT_STORAGE


def choose_folders(
    folders: Sequence[FolderFacts], *, every: bool, step: int | None, name: str | None
) -> tuple[FolderFacts, ...]:
    """The committed folders that the options name; by default the newest that a start would consider. Pure."""
    committed = [one for one in folders if one.has_manifest]
    if every:
        return tuple(committed)
    if name is not None:
        return tuple(one for one in committed if one.name == name)
    wanted = [one for one in committed if step in (None, one.step)]
    considered = [one for one in wanted if not one.quarantined]
    return tuple(considered[:1] or wanted[:1])


def read_and_judge(chosen: Sequence[Surveyed], *, threads: int, advance: Callable[[int], None]) -> list[Surveyed]:
    """Read all files of `chosen`, `threads` at once, each in the memory of a span or chunk. Raises: StorageError."""
    stopped = Event()
    jobs: list[tuple[Surveyed, FileRecord, Sequence[PlacedChunk]]] = []
    chosen = [_with_parts(one) for one in chosen]
    for one in chosen:
        if one.manifest is not None:
            placed_in = chunks_by_file(one.manifest)
            jobs += [(one, file, placed_in[file.name]) for file in one.manifest.files]

    def check(job: tuple[Surveyed, FileRecord, Sequence[PlacedChunk]]) -> tuple[str, ...]:
        one, file, placed = job
        return check_file(one.run, key_of(one.name, file.name), file=file, placed=placed, advance=advance, stopped=stopped)

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            found = list(pool.map(check, jobs))
        except BaseException:
            # `map` cancels the jobs that have not begun; the event ends the others.
            stopped.set()
            raise
    verdicts = []
    for one in chosen:
        bad_files = {file.name: bad for (owner, file, _), bad in zip(jobs, found, strict=True) if owner is one and bad}
        bad_files |= one.bad_files
        verdict = replace(one, bad_files=bad_files)
        # A run that trains prunes: it deletes the manifest first.
        if bad_files and not is_there(one.run, key_of(one.name, MANIFEST_NAME)):
            verdict = replace(verdict, gone=True)
        elif bad_files and one.state in (CheckpointState.VALID, CheckpointState.DAMAGED):
            # The survey has seen missing and short files, too, but reading them gives more details.
            verdict = replace(verdict, state=CheckpointState.DAMAGED, reason="")
        verdicts.append(verdict)
    return verdicts


def _with_parts(one: Surveyed) -> Surveyed:
    """With the contents of the parts of its manifest, but for damaged ones. Raises: StorageError."""
    if one.manifest is None:
        return one
    folder, bad = CheckpointFolder(one.run, f"{ROOT}/{one.name}/"), {}

    def note_bad(error: DamagedFileError) -> None:
        bad[error.file] = (str(error).removeprefix(folder.url(error.file)).lstrip(": "),)

    return replace(one, manifest=read_parts(folder, one.manifest, damaged=note_bad), bad_files=bad)


def check_file(
    store: Store, key: str, *, file: FileRecord, placed: Sequence[PlacedChunk], advance: Callable[[int], None], stopped: Event
) -> tuple[str, ...]:
    """What is wrong with a file, if two reads show it. `placed` is in the order of the bytes. Raises: StorageError."""
    first = _problems(store, key, file=file, placed=placed, advance=advance, stopped=stopped)
    if not first:
        return ()
    second = _problems(store, key, file=file, placed=placed, advance=lambda _: None, stopped=stopped)
    if not second:
        logger.warning("%s a second read returned the right bytes: %s", f"{store.url}/{key}", first[0])
        return ()
    lasting = tuple(problem for problem in second if problem in first)
    # Damage in the store is the same at each read.
    return lasting or (f"reads differently each time, as if the way to this machine garbled it: {first[0]}, then {second[0]}",)


def _problems(
    store: Store, key: str, *, file: FileRecord, placed: Sequence[PlacedChunk], advance: Callable[[int], None], stopped: Event
) -> tuple[str, ...]:
    spans = coalesced_reads(one.chunk for one in placed if one.chunk.size_bytes)
    names = {one.chunk: one.name for one in placed}
    whole = xxhash.xxh3_128()

    def read(start: int, end: int) -> memoryview:
        data = buffer[: end - start]
        count = store.read_into(key, data, start=start)
        if count < len(data):
            raise DamagedFileError(f"ends at byte {start + count}, too early")
        whole.update(data)
        advance(count)
        return data

    try:
        size_bytes = store.stat(key).size_bytes
        if size_bytes != file.size_bytes:
            return (f"must have {file.size_bytes} bytes, but has {size_bytes}",)
        # Allocated only now: a manifest may claim any size.
        buffer = memoryview(bytearray(max(file.header_bytes, *(span.end - span.start for span in spans), 0)))
        header = bytes(read(0, file.header_bytes))
        right = has_digest(header, file.header_digest, sha256=file.header_sha256)
        wrong = [] if right else ["its header does not have its digest"]
        for span in spans:
            if stopped.is_set():
                return ()
            for chunk in wrong_chunks(span, read(span.start, span.end)):
                place = f"bytes [{chunk.start}, {chunk.start + chunk.size_bytes})"
                wrong.append(f"{names[chunk]} in {place} does not have its digest")
        if not wrong:
            check_shard_header(header, file=file, chunks=placed, where="its header")
    except errors.ObjectNotFoundError:
        return ("is gone",)
    except (errors.IrregularFileError, errors.InvalidCheckpointError) as error:
        return (str(error),)
    if not wrong and whole.hexdigest() != file.digest:
        # The header is right, so the spans fill the file.
        return ("does not have its digest, although its header and all tensors in it have theirs",)
    return tuple(wrong)


def _text(verdict: Surveyed) -> str:
    manifest = verdict.manifest
    lines = [f"  {verdict.name}  {verdict.state.value}{f': {verdict.reason}' if verdict.reason else ''}"]
    if verdict.state is CheckpointState.VALID and manifest is not None:
        read = f"{size_text(manifest.size_bytes)} in {plural(len(manifest.files), 'file')}"
        lines[0] += f"  ({read}, {plural(len(manifest.tensors), 'tensor')}: every byte has its digest)"
    elif manifest is not None and not verdict.bad_files:
        lines.append(f"    all of its {plural(len(manifest.files), 'file')} have their digests")
    for name, problems in verdict.bad_files.items():
        lines += [f"    {name}: {problem}" for problem in problems[:_SHOWN_PER_FILE]]
        if len(problems) > _SHOWN_PER_FILE:
            lines.append(f"    {name}: and {len(problems) - _SHOWN_PER_FILE} more")
    return "\n".join(lines)


def sign_checkpoints(url: str, *, step: int | None, key_env: str) -> int:
    """Sign the checkpoint of `step`, the one that `url` names, or all of a run. The caller vouches for their present content.

    Raises: UsageError; NoValidCheckpointError if there is none; StorageError.
    """
    location = locate(url, key_env=key_env)
    if location.signing is None:
        raise errors.UsageError("--key-env must name an environment variable, but is empty")
    if location.folder is not None and step is not None:
        raise errors.UsageError(f"--step must go with the folder of a run, but {url} is one checkpoint")
    every = step is None and location.folder is None
    folders = choose_folders(list_checkpoints(location.run).folders, every=every, step=step, name=location.folder)
    # Surveyed without the key: checkpoints without its signature are to be signed.
    chosen = survey(replace(location, signing=None), folders)
    if not chosen:
        raise errors.NoValidCheckpointError(f"{location.url} must hold a checkpoint to sign, but does not")
    with progress("signing", 2 * sum(one.shard_bytes for one in chosen)) as advance:
        verdicts = read_and_judge(chosen, threads=READ_THREADS, advance=advance)
        signed = 0
        for one in verdicts:
            if one.state is not CheckpointState.VALID or one.manifest is None:
                note(f"{one.name} is {one.state.value}, and is not signed")
                continue
            _sign(one, one.manifest, signing=location.signing)
            advance(one.manifest.size_bytes)
            signed += 1
    result(f"signed {plural(signed, 'checkpoint')} of {len(verdicts)}")
    return errors.EXIT_OK if signed == len(verdicts) else errors.EXIT_STORAGE


def _sign(one: Surveyed, manifest: Manifest, *, signing: SigningKey) -> None:
    """Replace the manifest atomically, by one without parts. The bytes read for SHA-256 have the digests that were verified
    before."""
    folder = CheckpointFolder(one.run, f"{ROOT}/{one.name}/")
    chunks = {chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks}
    found = {chunk: sha256_of(b"") for chunk in chunks if not chunk.size_bytes}

    def take(chunk: ChunkRecord, data: memoryview) -> None:
        # Several threads may set items of a dict at once.
        found[chunk] = sha256_of(data)

    read_chunks(folder, chunks - found.keys(), take=take)
    change = msgspec.structs.replace
    tensors = {
        name: change(tensor, chunks=tuple(change(chunk, sha256=found[chunk]) for chunk in tensor.chunks))
        for name, tensor in manifest.tensors.items()
    }
    files = []
    for file in manifest.files:
        head = one.run.read(key_of(one.name, file.name), end=file.header_bytes)
        if not has_digest(head, file.header_digest, sha256=""):
            raise DamagedFileError(f"{folder.url(file.name)}: its header was changed while it was signed", file=file.name)
        files.append(change(file, header_sha256=sha256_of(head)))
    raw = encode_manifest(replace(manifest, files=tuple(files), tensors=tensors, signature=""), key=signing)
    one.run.write(key_of(one.name, MANIFEST_NAME), raw)
    for name in one.facts.files.keys() - {file.name for file in files}:
        if name.endswith(PART_SUFFIX):
            one.run.delete(key_of(one.name, name))
