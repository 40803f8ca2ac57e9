"""What `prepare` does next: which documents, in which pieces, from where; decided without touching a file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.data.index import Shard, TokenIndex, TokenizerDescription
from elastictrain.errors import DataError

PROGRESS_FILE = "prepare.json"
DEFAULT_SHARD_TOKENS = 2**27


@dataclass(frozen=True, slots=True)
class Document:
    """A text file; `name` is its path relative to the input that it was found by."""

    path: Path
    name: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next token comes from: token `token` of the piece that starts at `offset_bytes` of a document."""

    document: int
    offset_bytes: int
    token: int


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """What is finished of the work that has the digest `plan`."""

    plan: str
    shards: tuple[Shard, ...]
    position: Position


def plan_digest(documents: Sequence[Document], *, tokenizer: TokenizerDescription, shard_tokens: int) -> str:
    """Names the work: the same digest gives the same bytes."""
    plan = {
        "documents": [[document.name, document.size_bytes, document.modified_ns] for document in documents],
        "tokenizer": asdict(tokenizer),
        "shard_tokens": shard_tokens,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(plan, sort_keys=True).encode())


def shard_name(number: int) -> str:
    """The file of shard `number`."""
    return f"tokens-{number:05d}.bin"


def cut(data: bytes, *, final: bool) -> int:
    """Where the piece that begins with `data` ends: after the last line break, or else between two characters of UTF-8.

    Long documents are encoded in pieces, so that memory stays bounded; a piece that ends at a line break hardly changes the
    tokens.
    """
    if final:
        return len(data)
    end = data.rfind(b"\n") + 1
    if end:
        return end
    end = len(data) - 1
    while end > max(1, len(data) - 4) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def choose_start(*, plan: str, progress: PlanProgress | None, index: TokenIndex | None, url: str) -> PlanProgress | None:
    """From where to go on; None if all is done.

    Raises: DataError if the folder holds, or is being filled with, something else.
    """
    if progress is None and index is None:
        return PlanProgress(plan, (), Position(0, 0, 0))
    if progress is None or progress.plan != plan:
        raise DataError(
            f"{url} holds token files made from other inputs or with other options; choose another --out, or delete that "
            "folder to make "
            "them again"
        )
    return None if index is not None else progress


def encode_progress(progress: PlanProgress) -> bytes:
    """The content of `prepare.json`."""
    return json.dumps(asdict(progress), indent=1).encode() + b"\n"


def decode_progress(data: bytes, *, url: str) -> PlanProgress:
    """Reads `prepare.json`; `url` is for messages. Raises: DataError."""
    try:
        record = parse_json(data, limits=DOCUMENT)
        return PlanProgress(
            plan=str(record["plan"]),
            shards=tuple(Shard(**shard) for shard in record["shards"]),
            position=Position(**record["position"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{url} is damaged ({error}); delete that folder to prepare the data again") from None
