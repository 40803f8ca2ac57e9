"""Samples that hold whole documents, as many as fit one after the other; only a document that is too long for one is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastictrain.data.dataset import Batch
from elastictrain.data.index import TokenIndex, stored_type
from elastictrain.data.tokens import TokenDataset


def document_starts(index: TokenIndex, *, paths: Sequence[Path]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The token at which each document begins, ascending, [num_documents]. `paths` of all shards, and of the files beside them.

    Folders of older releases have no such files: there each separator ends a document.
    """
    if index.documents:
        found = [np.fromfile(path, dtype="<u8") for path in paths[len(index.shards) :]]
        return np.concatenate(found).astype(np.int64)
    ends, before = [np.zeros(1, dtype=np.int64)], 0
    for path, shard in zip(paths, index.shards, strict=True):
        tokens = np.fromfile(path, dtype=stored_type(index.dtype))
        ends.append(np.flatnonzero(tokens == index.tokenizer.separator) + (before + 1))
        before += shard.num_tokens
    starts = np.concatenate(ends)
    return starts[starts < before]


def pack(starts: "np.ndarray[Any, np.dtype[np.int64]]", *, num_tokens: int, seq_len: int) -> "np.ndarray[Any, Any]":
    """The tokens [begin, end) of each sample, [num_samples, 2] int64: at most seq_len + 1.

    Each sample takes the documents that follow, while they fit. The pieces of a document that is too long share one token, the
    target of the first and an input of the second.
    """
    ends = np.append(starts[1:], num_tokens)
    # Of a sample that begins with this document: full ones that come before it, its begin, and the document after it.
    cuts = np.maximum(0, -((starts - ends + seq_len + 1) // seq_len))
    begins = starts + cuts * seq_len
    following = np.searchsorted(ends, begins + seq_len + 1, side="right")
    chosen, document = [], 0
    while document < len(starts):
        chosen.append(document)
        document = int(following[document])
    first = np.array(chosen, dtype=np.int64)
    counts = cuts[first] + 1
    last = np.cumsum(counts) - 1
    ranges = np.empty((counts.sum(), 2), dtype=np.int64)
    ranges[:, 0] = np.repeat(begins[first], counts) + (np.arange(len(ranges)) - np.repeat(last, counts)) * seq_len
    ranges[:, 1] = ranges[:, 0] + seq_len + 1
    ranges[last, 1] = ends[following[first] - 1]
    return ranges


@dataclass(frozen=True, slots=True, eq=False)
class PackedDataset:
    """Sample i is the tokens `ranges[i]`, as {"tokens": int64 [seq_len + 1], "documents": int64 [seq_len + 1]}.

    Documents are counted from 0 within a sample. Behind the last one there are separators, which belong to document -1.
    """

    tokens: TokenDataset
    starts: "np.ndarray[Any, np.dtype[np.int64]]"  # of all documents
    ranges: "np.ndarray[Any, Any]"

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, index: int, /) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in [0, {len(self)})")
        begin, end = map(int, self.ranges[index])
        tokens = np.full(self.tokens.seq_len + 1, self.tokens.index.tokenizer.separator, dtype=np.int64)
        tokens[: end - begin] = self.tokens.read(begin, end)
        first, last = np.searchsorted(self.starts, begin, side="right"), np.searchsorted(self.starts, end, side="left")
        documents = np.zeros(len(tokens), dtype=np.int64)
        documents[self.starts[first:last] - begin] = 1
        documents = documents.cumsum()
        documents[end - begin :] = -1
        return {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents)}
