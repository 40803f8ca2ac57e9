"""The bytes of a manifest, and the conditions that its parts must meet. Free of torch.

The bytes are canonical JSON (sorted keys, no white space, ASCII) with a digest of all other bytes, so any change is detected.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from elastictrain.bounded_json import DOCUMENT, as_record, excess, parse_json
from elastictrain.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_COUNT,
    ChunkRecord,
    FileRecord,
    Manifest,
    PartBox,
    TensorRecord,
    counters_of,
    digest_of,
)
from elastictrain.checkpoint.safetensors_format import BY_NAME, LENGTH_BYTES, MAX_HEADER_BYTES
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.errors import CheckpointError, InvalidCheckpointError, UnknownFormatError, UntrustedCheckpointError

FORMAT = "elastictrain-checkpoint"
VERSION, VERSION_WITH_PARTS = 1, 2
DIGEST_ALGORITHM = "xxh3_128"
# Keys are sorted, so the digest goes before these bytes. No value contains them: quotation marks in values are escaped.
_ALGORITHM_KEY = b'"digest_algorithm":'
_PURPOSE = "elastictrain manifest"
MAX_DIMS = 64
MAX_CREATED = 253_402_300_799.0  # the last second of the year 9999: no calendar goes further

MOST_ENTANGLED = 8192  # most boxes compared pair by pair, because no cut separates them; cuts separate the shards of any mesh


def encode_manifest(manifest: Manifest, *, key: SigningKey | None = None) -> bytes:
    """The bytes of `manifest.json`; a key signs them, for which all chunks and headers must have their SHA-256.

    Raises: ValueError or TypeError if the state is not JSON (non-finite numbers are not); CheckpointError if no reader would
    accept a manifest of that size.
    """
    document = msgspec.to_builtins(replace(manifest, versions={}, state={}))
    del document["signature"]
    version = VERSION_WITH_PARTS if manifest.parts else VERSION
    if not manifest.parts:
        # A release that knows no parts can read it.
        del document["parts"], document["boxes"]
    # Only json encodes all kinds of text and numbers in these.
    document |= {"versions": dict(manifest.versions), "state": dict(manifest.state)}
    document |= {"format": FORMAT, "version": version, "digest_algorithm": DIGEST_ALGORITHM}
    if key is not None:
        document["signature"] = key.sign(_canonical(document), purpose=_PURPOSE)
    raw = _sealed(_canonical(document))
    if (problem := excess(raw, limits=DOCUMENT)) is not None:
        raise CheckpointError(
            f"{MANIFEST_NAME} {problem}; set a larger checkpoint.shard_mb, or a smaller checkpoint.manifest_mb"
        )
    return raw


def parse_manifest(raw: bytes, *, where: str, key: SigningKey | None = None) -> Manifest:
    """The manifest, if `raw` is exactly what `encode_manifest` wrote, signed with `key` if there is one.

    Raises: only InvalidCheckpointError, UntrustedCheckpointError or UnknownFormatError, naming `where` and the reason.
    """
    try:
        document = parse_json(raw, limits=DOCUMENT)
    except ValueError as error:
        raise InvalidCheckpointError(f"{where}: {error}" if raw else f"{where}: is empty") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidCheckpointError(f"{where}: is JSON, but not a checkpoint manifest (`format` must be {FORMAT!r})")
    version, algorithm, stated = document.get("version"), document.get("digest_algorithm"), document.pop("digest", None)
    known = version in (VERSION, VERSION_WITH_PARTS)
    unknown = UnknownFormatError(
        f"{where}: is of format version {version!r}, but this release of elastictrain reads versions {VERSION} and "
        f"{VERSION_WITH_PARTS}; use a release that reads it, or another `run.dir` for a new run. Nothing was changed"
    )
    if isinstance(version, int) and not known and isinstance(algorithm, str) and algorithm != DIGEST_ALGORITHM:
        raise unknown
    try:
        text = _canonical(document)
        exact = _sealed(text) == raw
    except (ValueError, TypeError) as error:
        raise InvalidCheckpointError(f"{where}: is not in canonical form ({type(error).__name__}: {error})") from error
    if not exact:
        computed = digest_of(text)
        raise InvalidCheckpointError(f"{where}: its digest is {computed}, but must be {stated}: bytes were changed or lost")
    if not known:
        # Only after the digest: a garbled version is damage, like any other byte.
        raise unknown
    if key is not None:
        _check_signature(document, key=key, where=where)
    try:
        manifest = as_record(document, Manifest)
        if bool(manifest.parts) != (version == VERSION_WITH_PARTS):
            raise ValueError(
                f"must be of version {VERSION_WITH_PARTS} if it has parts, and of {VERSION} if not, but is of {version}"
            )
        if key is None and b'sha256":' in raw:
            # Unsigned SHA-256 prove nothing, and take longer to compute.
            files, tensors = without_sha256(manifest.files, manifest.tensors)
            parts = tuple(msgspec.structs.replace(part, sha256="") for part in manifest.parts)
            manifest = replace(manifest, files=files, tensors=tensors, parts=parts)
        elif key is not None:
            check_sha256(manifest.files, manifest.tensors)
            if not all(part.sha256 for part in manifest.parts):
                raise ValueError("must have the SHA-256 of every part, because it is signed")
        check_manifest(manifest)
    except ValueError as error:
        raise InvalidCheckpointError(f"{where}: {error}") from error
    return manifest


def _check_signature(document: Mapping[str, object], *, key: SigningKey, where: str) -> None:
    signature = document.get("signature")
    if not isinstance(signature, str):
        raise UntrustedCheckpointError(
            f"{where}: must be signed with the key in {key.name}, but is not signed; if it is yours, sign it: "
            f"python -m elastictrain.checkpoint sign URL --key-env {key.name}"
        )
    signed = _canonical({name: value for name, value in document.items() if name != "signature"})
    if not key.is_signed(signed, signature, purpose=_PURPOSE):
        raise UntrustedCheckpointError(
            f"{where}: must be signed with the key in {key.name}, but is signed with another one, or was changed since"
        )


def _canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sealed(text: bytes) -> bytes:
    """Canonical bytes with their digest inserted. Raises: ValueError if they have no place for it."""
    place = text.index(_ALGORITHM_KEY)
    return b"".join((text[:place], b'"digest":"', digest_of(text).encode(), b'",', text[place:]))


Files = tuple[FileRecord, ...]
Tensors = Mapping[str, TensorRecord]


def without_sha256(files: Files, tensors: Tensors) -> tuple[Files, dict[str, TensorRecord]]:
    change = msgspec.structs.replace
    bare = {
        name: change(tensor, chunks=tuple(change(chunk, sha256="") for chunk in tensor.chunks))
        for name, tensor in tensors.items()
    }
    return tuple(change(file, header_sha256="") for file in files), bare


def check_sha256(files: Files, tensors: Tensors) -> None:
    """Raises: ValueError unless every header and chunk has its SHA-256."""
    chunks = (chunk for tensor in tensors.values() for chunk in tensor.chunks)
    if not all([*(file.header_sha256 for file in files), *(one.sha256 for one in chunks)]):
        raise ValueError("must have the SHA-256 of every header and chunk, because it is signed")


def check_manifest(manifest: Manifest) -> None:
    """What readers rely on when they index and allocate without looking.

    Raises: ValueError naming the part that is wrong, what it must be, and what it is.
    """
    if not 0 <= manifest.created <= MAX_CREATED:
        raise ValueError(f"`created` must be a time in seconds before the year 10000, but is {manifest.created}")
    names = [name for name, _ in manifest.objects]
    if len(set(names)) != len(names):
        raise ValueError("two files have the same name")
    if large := next((part for part in manifest.parts if part.size_bytes > DOCUMENT.max_bytes), None):
        raise ValueError(f"{large.name} must have at most {DOCUMENT.max_bytes} bytes, but has {large.size_bytes}")
    check_tensors(manifest.files, manifest.tensors)
    _check_tiling(manifest)
    counters_of(manifest.state, step=manifest.step)


def check_tensors(files: Files, tensors: Tensors) -> None:
    """That files and chunks are possible; not that the chunks fill the tensors. Raises: ValueError naming what is wrong."""
    for file in files:
        most = min(file.size_bytes, LENGTH_BYTES + MAX_HEADER_BYTES)
        if not LENGTH_BYTES <= file.header_bytes <= most:
            raise ValueError(
                f"{file.name} must have a header of {LENGTH_BYTES} to {most} bytes, but it has {file.header_bytes}"
            )
    by_name = {file.name: file for file in files}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, by_name)


def _check_tensor(name: str, tensor: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    element = BY_NAME.get(tensor.dtype)
    if element is None:
        raise ValueError(f"tensor {name!r} has the unknown element type {tensor.dtype!r}")
    if len(tensor.shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} must have at most {MAX_DIMS} dimensions, but has {len(tensor.shape)}")
    # A dimension of 0 would hide the others, which torch also multiplies.
    if math.prod(max(1, size) for size in tensor.shape) * element.size_bytes > MAX_COUNT:
        raise ValueError(f"tensor {name!r} must have at most {MAX_COUNT} bytes, but has the shape {list(tensor.shape)}")
    for chunk in tensor.chunks:
        # Checked before any product: that of thousands of dimensions takes hours.
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
            raise ValueError(f"a chunk of tensor {name!r} has another number of dimensions than the tensor")
        if chunk.size_bytes != math.prod(chunk.sizes) * element.size_bytes:
            raise ValueError(f"a chunk of tensor {name!r} has another number of bytes than its sizes say")
        file = files.get(chunk.file)
        if file is None or not file.header_bytes <= chunk.start <= chunk.start + chunk.size_bytes <= file.size_bytes:
            raise ValueError(f"a chunk of tensor {name!r} lies outside of the files")


def _check_tiling(manifest: Manifest) -> None:
    """Raises: ValueError unless chunks and boxes of parts fill each tensor."""
    checked: dict[int, tuple[int, ...] | None] = {}  # boxes, and the shape of the tensors that they fill without chunks
    for name, tensor in manifest.tensors.items():
        boxes: tuple[PartBox, ...] = ()
        if tensor.boxes is not None:
            if tensor.boxes >= len(manifest.boxes):
                raise ValueError(f"tensor {name!r} has boxes number {tensor.boxes}, but there are {len(manifest.boxes)}")
            if tensor.boxes in checked:
                # Many tensors are divided alike. To check thousands of boxes for each would take hours.
                if tensor.chunks or checked[tensor.boxes] != tensor.shape:
                    raise ValueError(f"tensor {name!r} has the boxes of a tensor of another shape")
                continue
            checked[tensor.boxes] = None if tensor.chunks else tensor.shape
            boxes = manifest.boxes[tensor.boxes]
        for box in boxes:
            if not len(box.offsets) == len(box.sizes) == len(tensor.shape) or box.part >= len(manifest.parts):
                raise ValueError(f"a box of tensor {name!r} has another number of dimensions, or is in no part")
        if (problem := tiling_problem(tensor.shape, [*tensor.chunks, *boxes])) is not None:
            raise ValueError(f"tensor {name!r}: its chunks {problem}")


def tiling_problem(shape: Sequence[int], chunks: Sequence[ChunkRecord | PartBox]) -> str | None:
    """Why the chunks do not fill a tensor of that shape, as the end of a sentence on "its chunks"; None if they do.

    They are cut apart along one dimension after the other, until each is alone or no cut separates them.
    """
    for chunk in chunks:
        if any(first + size > extent for first, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return "reach beyond the tensor"
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    volume = sum(math.prod(chunk.sizes) for chunk in filled)
    if volume != math.prod(shape):
        return f"do not fill it: they have {volume} elements together, and the tensor has {math.prod(shape)}"
    waiting: list[tuple[list[ChunkRecord | PartBox], int, int]] = [(filled, 0, 0)]
    while waiting:
        group, dim, uncut = waiting.pop()
        if len(group) < 2:
            continue
        if uncut == len(shape):
            if (problem := _overlap(group)) is not None:
                return problem
            continue
        parts = _cut(group, dim)
        following = (dim + 1) % len(shape)
        waiting += [(part, following, uncut + 1 if len(parts) == 1 else 0) for part in parts]
    return None


def _cut(chunks: list[ChunkRecord | PartBox], dim: int) -> list[list[ChunkRecord | PartBox]]:
    """Groups whose extents along `dim` touch those of no other group."""
    parts: list[list[ChunkRecord | PartBox]] = []
    end = -1
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        if chunk.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    return parts


def _overlap(chunks: list[ChunkRecord | PartBox]) -> str | None:
    if len(chunks) > MOST_ENTANGLED:
        return f"lie in no grid: {len(chunks)} of them cannot be told apart by a cut, and at most {MOST_ENTANGLED} may be"
    import numpy as np

    begins = np.array([chunk.offsets for chunk in chunks], dtype=np.uint64)
    ends = begins + np.array([chunk.sizes for chunk in chunks], dtype=np.uint64)
    for index in range(len(chunks) - 1):
        apart = (begins[index + 1 :] >= ends[index]) | (ends[index + 1 :] <= begins[index])
        shared = np.flatnonzero(~apart.any(axis=1))
        if len(shared):
            return f"overlap: {_box_text(chunks[index])} and {_box_text(chunks[index + 1 + int(shared[0])])}"
    return None


def _box_text(chunk: ChunkRecord | PartBox) -> str:
    return "[" + ",".join(f"{first}:{first + size}" for first, size in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"
