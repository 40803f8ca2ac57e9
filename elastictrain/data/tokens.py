"""Token files as a map-style data set of fixed-length samples."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from elastictrain.data.dataset import Batch
from elastictrain.data.index import TokenIndex, stored_type
from elastictrain.storage.posix import Place, opened_folder


@dataclass(eq=False)
class TokenDataset:
    """Samples [first_sample, first_sample + num_samples) of token files on a local disk.

    Sample i is {"tokens": int64 [seq_len + 1]}, the tokens [i * seq_len, (i + 1) * seq_len] of the concatenated shards: the
    last token of one sample is the first of the next, so every token is a target once. Each process maps a file when it first
    reads it.
    """

    index: TokenIndex
    _: KW_ONLY
    paths: Sequence[Path]
    seq_len: int
    first_sample: int
    num_samples: int
    lease: object = None  # held as long as the data set, so that the cache does not remove the files

    def __post_init__(self) -> None:
        self._dtype = stored_type(self.index.dtype)
        self._ends = tuple(accumulate(shard.num_tokens for shard in self.index.shards))
        self._maps: list[npt.NDArray[np.uint16 | np.uint32] | None] = [None] * len(self.paths)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Batch:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is not in [0, {self.num_samples})")
        start = (self.first_sample + index) * self.seq_len
        return {"tokens": torch.from_numpy(self.read(start, start + self.seq_len + 1))}

    def read(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [start, end) of the concatenated shards."""
        number = bisect_right(self._ends, start)
        tokens = np.empty(end - start, dtype=np.int64)
        filled = 0
        while filled < len(tokens):
            begin = self._ends[number - 1] if number else 0
            piece = self._map(number)[start + filled - begin : end - begin]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return tokens

    def _map(self, number: int) -> npt.NDArray[np.uint16 | np.uint32]:
        tokens = self._maps[number]
        if tokens is not None:
            return tokens
        size = self._ends[number] - (self._ends[number - 1] if number else 0)
        # An empty file cannot be mapped.
        tokens = np.empty(0, dtype=self._dtype)
        if size:
            path = self.paths[number]
            with opened_folder(str(path.parent), "") as handle:
                descriptor = Place(handle, path.name, str(path)).open(os.O_RDONLY, follow=True)
            with open(descriptor, "rb") as file:  # noqa: PTH123
                # The view is a plain array: slicing a memmap costs several times as much.
                tokens = np.memmap(file, dtype=self._dtype, mode="r", shape=(size,)).view(np.ndarray)
        self._maps[number] = tokens
        return tokens

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": [None] * len(self._maps), "lease": None}
