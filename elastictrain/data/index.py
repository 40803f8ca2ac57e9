"""The index of a folder of token files. It is written last, so a folder with an index is complete.

The folder holds `index.json`, shards `tokens-00000.bin`, ... and, for each, `documents-00000.bin`, ..., which folders of
older releases lack: little-endian unsigned integers and nothing else. The data set is the concatenation of its shards.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import xxhash

from elastictrain.bounded_json import DOCUMENT, as_record, parse_json
from elastictrain.errors import DataError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.local import LocalStore
from elastictrain.storage.store import Store

INDEX_FILE = "index.json"
FORMAT = "elastictrain.tokens"
VERSION = 1

TokenType = Literal["uint16", "uint32"]
_Count = Annotated[int, msgspec.Meta(ge=0)]

# The name comes from outside and becomes a path below the cache folder: it must not lead out of it.
_PlainName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.\.?\Z)[^/\0]+\Z")]


@dataclass(frozen=True, slots=True)
class TokenizerDescription:
    """How text became tokens; enough to load the same tokenizer again."""

    kind: Literal["bytes", "huggingface"]
    vocab_size: _Count  # one more than the largest token id
    separator: _Count  # the token that ends every document
    digest: str  # xxh3_128 of the tokenizer file, which lies beside the index as `tokenizer.json`; empty if there is none


@dataclass(frozen=True, slots=True)
class Shard:
    file: _PlainName
    num_tokens: _Count
    size_bytes: _Count
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class DocumentStarts:
    """The file for one shard with the tokens at which documents begin, counted from the first shard: uint64, ascending."""

    file: _PlainName
    num_documents: _Count
    size_bytes: _Count
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class TokenIndex:
    dtype: TokenType
    tokenizer: TokenizerDescription
    num_documents: _Count
    shards: tuple[Shard, ...]
    documents: tuple[DocumentStarts, ...] = ()
    """One per shard; empty in what an older release has prepared. No part of the digest: the same tokens are the same data."""

    @property
    def files(self) -> "tuple[Shard | DocumentStarts, ...]":
        return (*self.shards, *self.documents)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """Identifies the data: two folders with the same digest hold the same tokens."""
        return xxhash.xxh3_128_hexdigest(json.dumps(_body(self), sort_keys=True).encode())

    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` inputs; each also needs the token after its last input as a target."""
        return max(0, (self.num_tokens - 1) // seq_len)


def stored_type(dtype: TokenType) -> "np.dtype[Any]":
    """The type of tokens in the files, the same on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def _body(index: TokenIndex) -> dict[str, object]:
    totals = {"num_tokens": index.num_tokens, "size_bytes": index.size_bytes}
    body = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(index), **totals}
    del body["documents"]
    return body


def encode_index(index: TokenIndex) -> bytes:
    documents = {"documents": msgspec.to_builtins(index.documents)} if index.documents else {}
    return json.dumps({**_body(index), **documents, "digest": index.digest}, indent=1).encode() + b"\n"


def decode_index(data: bytes, *, url: str) -> TokenIndex:
    """Parse `index.json`; `url` is for messages. Raises: DataError if it is damaged or no index of this version."""

    def damaged(trouble: str) -> DataError:
        return DataError(f"{url} {trouble}; prepare the data again")

    try:
        record = parse_json(data, limits=DOCUMENT)
    except ValueError as error:
        raise damaged(f"must be a JSON file, but is damaged ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(
            f"{url} must be an index of token files, but is something else; was `data.path` meant to be this folder?"
        )
    if record.get("version") != VERSION:
        raise DataError(
            f"{url} must have version {VERSION}, but has {record.get('version')!r}; prepare the data again with this version "
            "of elastictrain, or use the version that wrote it"
        )
    try:
        index = as_record(record, TokenIndex)
    except ValueError as error:
        raise damaged(f"is damaged: it {error}") from None
    derived = {"digest": index.digest, "num_tokens": index.num_tokens, "size_bytes": index.size_bytes}
    if any(record.get(name) != value for name, value in derived.items()):
        raise damaged(f"is damaged: its digest must be {index.digest}, but is {record.get('digest')!r}")
    width = stored_type(index.dtype).itemsize
    for shard in index.shards:
        if shard.size_bytes != shard.num_tokens * width:
            tokens = f"{shard.num_tokens} tokens of {width} bytes"
            raise damaged(f"contradicts itself: {shard.file} with {tokens} has {shard.size_bytes} bytes")
    starts = sum(one.num_documents for one in index.documents)
    sizes = all(one.size_bytes == 8 * one.num_documents for one in index.documents)
    if index.documents and (starts != index.num_documents or len(index.documents) != len(index.shards) or not sizes):
        raise damaged(f"contradicts itself: of {index.num_documents} documents it lists {starts}")
    return index


def read_index(store: Store) -> TokenIndex:
    """Read the index at the store's root. Raises: DataError if it is missing or damaged; StorageError."""
    make = f"make it with: python -m elastictrain.data prepare TEXT... --out {store.url}"
    if isinstance(store, LocalStore):
        path = Path(store.root).absolute()
        there = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
        if os.path.lexists(there) and not there.is_dir():
            made = f"make one with: python -m elastictrain.data prepare {store.url} --out FOLDER"
            raise DataError(f"{store.url} must be a folder of token files, but {there} is no folder; {made}")
    try:
        data = read_bounded(store, INDEX_FILE, max_bytes=DOCUMENT_BYTES)
    except ObjectTooLargeError as error:
        raise DataError(f"{error}: it is no index of token files; prepare the data again") from None
    except ObjectNotFoundError:
        again = "if its preparation was interrupted, run the same `prepare` command again"
        remedy = again if any(True for _ in store.list()) else make
        raise DataError(f"{store.url} must be a folder of token files, but has no {INDEX_FILE}; {remedy}") from None
    return decode_index(data, url=f"{store.url}/{INDEX_FILE}")
