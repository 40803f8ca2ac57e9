"""One 64-bit number for the bits of many tensors, computed where they are."""

from collections.abc import Iterable

import torch
from torch import Tensor

from elastictrain.train.parameters import local

_WORD_BYTES = 8
_ROW_WORDS = 4096
_ROW_BYTES = _WORD_BYTES * _ROW_WORDS
# 2^64 divided by the golden ratio, as a signed number: neighbours get weights that have little in common.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


class StateDigest:
    """Digests the same tensors again and again: deterministic, and different after the flip of any single bit.

    Words of eight bytes are added up in rows, and the sums of rows are added up with odd weights, all modulo 2^64. A flipped
    bit changes its word by a power of two, and an odd weight takes no power of two to zero. Each byte is read once; the memory
    that this takes is a few thousandths of the tensors' own.
    """

    def __init__(self) -> None:
        self._weights: Tensor | None = None

    @torch.no_grad()
    def __call__(self, tensors: Iterable[Tensor]) -> Tensor:
        """The digest [] int64 of this rank's part of `tensors`, on their device; nothing waits for it."""
        sums: list[Tensor] = []
        rests: list[Tensor] = []
        for tensor in tensors:
            content = _bytes_of(local(tensor).detach())
            in_rows = content.numel() - content.numel() % _ROW_BYTES
            if in_rows:
                sums.append(_row_sums(content[:in_rows]))
            if in_rows < content.numel():
                rests.append(content[in_rows:])
        if rests:
            # Small tensors are many: one concatenation, instead of a kernel for each.
            filled = sum(rest.numel() for rest in rests)
            rests.append(torch.zeros(-filled % _ROW_BYTES, dtype=torch.uint8, device=rests[0].device))
            sums.append(_row_sums(torch.cat(rests)))
        if not sums:
            return torch.zeros((), dtype=torch.int64)
        rows = torch.cat(sums)
        return (rows * self._weights_of(rows)).sum()

    def _weights_of(self, rows: Tensor) -> Tensor:
        if self._weights is None or self._weights.shape != rows.shape or self._weights.device != rows.device:
            self._weights = (torch.arange(1, 1 + rows.numel(), device=rows.device) * _SPREAD) | 1
        return self._weights


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        # Words can be read at multiples of their size only.
        flat = flat.clone()
    return flat.view(torch.uint8)


def _row_sums(content: Tensor) -> Tensor:
    return content.view(torch.int64).view(-1, _ROW_WORDS).sum(dim=1)
