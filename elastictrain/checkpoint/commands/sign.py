"""`sign`: reads every byte of checkpoints that are there already, and signs their manifests."""

import threading
from dataclasses import replace

import msgspec

from elastictrain.checkpoint.commands.output import note, plural, progress, result
from elastictrain.checkpoint.commands.survey import RunLocation, Surveyed, list_folders, locate, survey
from elastictrain.checkpoint.commands.verify import choose_folders, read_and_judge
from elastictrain.checkpoint.folders import ROOT, key_of
from elastictrain.checkpoint.manifest import MANIFEST_NAME, ChunkRecord, FileRecord, Manifest, has_digest, sha256_of
from elastictrain.checkpoint.manifest_format import encode_manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, read_chunks
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, NoValidCheckpointError, UsageError


def sign_checkpoints(url: str, *, step: int | None, threads: int, key_env: str) -> int:
    """Signs the checkpoint of `step`, the one that `url` names, or all of a run, with the key in `key_env`; returns the exit
    code. Whoever calls it vouches for what is there now.

    Raises: UsageError; NoValidCheckpointError if there is none; StorageError.
    """
    signing = locate(url, key_env=key_env).signing
    if signing is None:
        raise UsageError("--key-env must name an environment variable, but is empty")
    location = locate(url)
    if location.folder is not None and step is not None:
        raise UsageError(f"--step must go with the folder of a run, but {url} is one checkpoint")
    every = step is None and location.folder is None
    chosen = survey(location, choose_folders(list_folders(location), every=every, step=step, name=location.folder))
    if not chosen:
        raise NoValidCheckpointError(f"{location.url} must hold a checkpoint to sign, but does not")
    total = sum(one.manifest.size_bytes for one in chosen if one.manifest is not None)
    with progress("signing", total=2 * total, unit="B") as advance:
        verdicts = read_and_judge(chosen, threads=threads, advance=advance)
        signed = 0
        for verdict in verdicts:
            one = verdict.checked
            if verdict.state.value != "valid" or one.manifest is None:
                note(f"{one.name} is {verdict.state.value}, and is not signed")
                continue
            _sign(location, one, one.manifest, signing=signing, threads=threads)
            advance(one.manifest.size_bytes)
            signed += 1
    result(f"signed {plural(signed, 'checkpoint')} of {len(verdicts)}")
    return EXIT_OK if signed == len(verdicts) else EXIT_STORAGE


def _sign(location: RunLocation, one: Surveyed, manifest: Manifest, *, signing: SigningKey, threads: int) -> None:
    """Replaces the manifest, at once. What is read for SHA-256 has the digests that were verified before."""
    folder = CheckpointFolder(location.run, f"{ROOT}/{one.name}/")
    found: dict[ChunkRecord, str] = {}
    lock = threading.Lock()

    def take(chunk: ChunkRecord, data: memoryview) -> None:
        digest = sha256_of(data)
        with lock:
            found[chunk] = digest

    chunks = {chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks}
    read_chunks(folder, (chunk for chunk in chunks if chunk.size_bytes), take=take, threads=threads)
    signed = {chunk: msgspec.structs.replace(chunk, sha256=found.get(chunk, sha256_of(b""))) for chunk in chunks}
    tensors = {
        name: replace(tensor, chunks=tuple(signed[chunk] for chunk in tensor.chunks))
        for name, tensor in manifest.tensors.items()
    }
    files = tuple(msgspec.structs.replace(file, header_sha256=_sha256_of_header(folder, file)) for file in manifest.files)
    raw = encode_manifest(replace(manifest, files=files, tensors=tensors, signature=""), key=signing)
    location.run.write(key_of(one.name, MANIFEST_NAME), raw)


def _sha256_of_header(folder: CheckpointFolder, file: FileRecord) -> str:
    head = folder.store.read(f"{folder.prefix}{file.name}", end=file.header_bytes)
    if not has_digest(head, file.header_digest, sha256=""):
        raise DamagedFileError(f"{folder.url(file.name)}: its header was changed while it was signed", file=file.name)
    return sha256_of(head)
