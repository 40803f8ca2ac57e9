"""The bytes of a manifest. Free of torch.

They are canonical JSON (sorted keys, no white space, ASCII) with a digest over themselves without the digest, so any byte
that differs from what was written is noticed.
"""

import json
import re
from collections.abc import Mapping

import xxhash

from elastictrain.bounded_json import DOCUMENT, excess, parse_json
from elastictrain.checkpoint.manifest import (
    MANIFEST_NAME,
    ChunkRecord,
    FileRecord,
    JsonValue,
    Manifest,
    TensorRecord,
    digest_of,
)
from elastictrain.checkpoint.manifest_check import check_manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.errors import CheckpointError, InvalidCheckpointError, UnknownFormatError, UntrustedCheckpointError

FORMAT = "elastictrain-checkpoint"
VERSION = 1
DIGEST_ALGORITHM = "xxh3_128"
_ALGORITHM_KEY = b'"digest_algorithm":'
"""Keys are sorted, so the digest goes before these bytes. Nothing before them can look alike: in values, quotation marks are
escaped."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PURPOSE = "elastictrain manifest"


def encode_manifest(manifest: Manifest, *, key: SigningKey | None = None) -> bytes:
    """The bytes of `manifest.json`; signed if there is a key, for which all chunks and headers must have their SHA-256.

    Raises: ValueError or TypeError if the state is not JSON (non-finite numbers are not); CheckpointError if no reader would
    take a manifest of that size.
    """
    document: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "digest_algorithm": DIGEST_ALGORITHM,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "incarnation": manifest.incarnation,
        "created": manifest.created,
        "config_digest": manifest.config_digest,
        "versions": dict(manifest.versions),
        "state": dict(manifest.state),
        "files": [
            {
                "name": file.name,
                "bytes": file.size_bytes,
                "digest": file.digest,
                "header_bytes": file.header_bytes,
                "header_digest": file.header_digest,
                **({"header_sha256": file.header_sha256} if file.header_sha256 else {}),
            }
            for file in manifest.files
        ],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "chunks": [
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": chunk.file,
                        "start": chunk.start,
                        "bytes": chunk.size_bytes,
                        "digest": chunk.digest,
                        **({"sha256": chunk.sha256} if chunk.sha256 else {}),
                    }
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    if key is not None:
        document["signature"] = key.sign(_canonical(document), purpose=_PURPOSE)
    text = _canonical(document)
    place = text.index(_ALGORITHM_KEY)
    raw = b"".join((text[:place], _stated(digest_of(text)), text[place:]))
    if (problem := excess(raw, limits=DOCUMENT)) is not None:
        raise CheckpointError(f"{MANIFEST_NAME} {problem}; set a larger checkpoint.shard_mb or shard over fewer ranks")
    return raw


def parse_manifest(raw: bytes, *, where: str, key: SigningKey | None = None) -> Manifest:
    """The manifest, if `raw` is exactly what `encode_manifest` once wrote, and is signed with `key` if there is one.

    Raises: InvalidCheckpointError, UntrustedCheckpointError or UnknownFormatError, and nothing else, naming `where` and the
    reason.
    """
    try:
        document = parse_json(raw, limits=DOCUMENT)
    except ValueError as error:
        raise InvalidCheckpointError(f"{where}: {error}" if raw else f"{where}: is empty") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidCheckpointError(f"{where}: is JSON, but not a checkpoint manifest (`format` must be {FORMAT!r})")
    version, algorithm = document.get("version"), document.get("digest_algorithm")
    unknown = UnknownFormatError(
        f"{where}: is of format version {version!r}, but this release of elastictrain reads version {VERSION}; "
        "use a release that reads it, or another `run.dir` for a new run. Nothing was changed"
    )
    if isinstance(version, int) and version != VERSION and isinstance(algorithm, str) and algorithm != DIGEST_ALGORITHM:
        raise unknown
    try:
        stated = document.get("digest")
        exact = _canonical(document) == raw
        computed = _digest_without(raw, stated)
    except (ValueError, TypeError) as error:
        raise InvalidCheckpointError(f"{where}: is not in canonical form ({type(error).__name__}: {error})") from error
    if stated != computed or not exact:
        raise InvalidCheckpointError(f"{where}: its digest is {computed}, but must be {stated}: bytes were changed or lost")
    if version != VERSION:
        # Only now: a version that was garbled is damage, like any other byte.
        raise unknown
    if key is not None:
        _check_signature(document, key=key, where=where)
    try:
        manifest = _manifest(document, with_sha256=key is not None)
        check_manifest(manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidCheckpointError(f"{where}: {type(error).__name__}: {error}") from error
    return manifest


def _check_signature(document: Mapping[str, object], *, key: SigningKey, where: str) -> None:
    signature = document.get("signature")
    if not isinstance(signature, str):
        raise UntrustedCheckpointError(
            f"{where}: must be signed with the key in {key.name}, but is not signed; if it is yours, sign it: "
            f"python -m elastictrain.checkpoint sign URL --key-env {key.name}"
        )
    signed = _canonical({name: value for name, value in document.items() if name not in ("digest", "signature")})
    if not key.is_signed(signed, signature, purpose=_PURPOSE):
        raise UntrustedCheckpointError(
            f"{where}: must be signed with the key in {key.name}, but is signed with another one, or was changed since"
        )


def _stated(digest: object) -> bytes:
    return b'"digest":' + _canonical(digest) + b","


def _digest_without(raw: bytes, stated: object) -> str:
    """The digest of canonical bytes as they were before their own digest was put in."""
    told = _stated(stated)
    place = raw.find(told + _ALGORITHM_KEY)
    view = memoryview(raw)
    computed = xxhash.xxh3_128(view[: max(place, 0)])
    computed.update(view[place + len(told) :] if place >= 0 else view)
    return computed.hexdigest()


def _canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _manifest(document: Mapping[str, object], *, with_sha256: bool) -> Manifest:
    """`with_sha256`: they are vouched for, and are to be there."""
    created = document["created"]
    if isinstance(created, bool) or not isinstance(created, int | float):
        raise TypeError(f"`created` must be a number, but is {created!r}")
    versions = _mapping(document["versions"], "versions")
    return Manifest(
        step=_count(document["step"], "step"),
        world_size=_count(document["world_size"], "world_size"),
        incarnation=_text(document["incarnation"], "incarnation"),
        created=float(created),
        config_digest=_text(document["config_digest"], "config_digest"),
        versions={name: _text(version, f"versions.{name}") for name, version in versions.items()},
        state=_json_mapping(document["state"]),
        files=tuple(_file(_mapping(file, "files"), with_sha256=with_sha256) for file in _list(document["files"], "files")),
        tensors={
            name: _tensor(_mapping(tensor, name), name, with_sha256=with_sha256)
            for name, tensor in _mapping(document["tensors"], "tensors").items()
        },
        signature=_text(document.get("signature", ""), "signature"),
    )


def _file(document: Mapping[str, object], *, with_sha256: bool) -> FileRecord:
    name = _text(document["name"], "files.name")
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} is not a name of a shard file")
    return FileRecord(
        name=name,
        size_bytes=_count(document["bytes"], name),
        digest=_digest(document["digest"], name),
        header_bytes=_count(document["header_bytes"], name),
        header_digest=_digest(document["header_digest"], name),
        header_sha256=_sha256(document["header_sha256"], name) if with_sha256 else "",
    )


def _tensor(document: Mapping[str, object], name: str, *, with_sha256: bool) -> TensorRecord:
    chunks = [_mapping(chunk, name) for chunk in _list(document["chunks"], name)]
    return TensorRecord(
        dtype=_text(document["dtype"], name),
        shape=_counts(document["shape"], name),
        chunks=tuple(
            ChunkRecord(
                offsets=_counts(chunk["offsets"], name),
                sizes=_counts(chunk["sizes"], name),
                file=_text(chunk["file"], name),
                start=_count(chunk["start"], name),
                size_bytes=_count(chunk["bytes"], name),
                digest=_digest(chunk["digest"], name),
                sha256=_sha256(chunk["sha256"], name) if with_sha256 else "",
            )
            for chunk in chunks
        ),
    )


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{what}: must be a whole number >= 0, but is {value!r}")
    return value


def _counts(value: object, what: str) -> tuple[int, ...]:
    return tuple(_count(item, what) for item in _list(value, what))


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what}: must be a text, but is {value!r}")
    return value


def _digest(value: object, what: str) -> str:
    text = _text(value, what)
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"{what}: {text!r} is not a digest")
    return text


def _sha256(value: object, what: str) -> str:
    text = _text(value, what)
    if not _SHA256.fullmatch(text):
        raise ValueError(f"{what}: {text!r} is not a SHA-256")
    return text


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{what}: must be a list, but is {type(value).__name__}")
    return value


def _mapping(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{what}: must be an object, but is {type(value).__name__}")
    return value


def _json_mapping(value: object) -> dict[str, JsonValue]:
    state: dict[str, JsonValue] = {}
    for name, item in _mapping(value, "state").items():
        state[name] = _json(item)
    return state


def _json(value: object) -> JsonValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_json(item) for item in value]
    return {str(name): _json(item) for name, item in _mapping(value, "state").items()}
