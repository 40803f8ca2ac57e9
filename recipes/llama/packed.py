"""Attention within documents, where a sample holds several."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Only compiled it skips what is masked.
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True, slots=True)
class Packed:
    """What the blocks need to know of the documents in a micro-batch."""

    positions: Tensor  # [B, T] int64, counted from the document's first token
    mask: Any  # which keys a query sees: [B, 1, T, T] bool, or a BlockMask on a GPU
    flex: Any = None  # the compiled `flex_attention`, on a GPU; looked up out here, since compiled blocks cannot use a cache

    @classmethod
    def of(cls, documents: Tensor) -> Self:
        """`documents` [B, T] int64: consecutive tokens with the same number are one document."""
        length = documents.shape[1]
        index = torch.arange(length, device=documents.device)
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        positions = index - torch.where(begins, index, 0).cummax(dim=1).values
        if documents.device.type != "cuda":
            return cls(positions, (documents[:, None, :, None] == documents[:, None, None, :]) & (index[:, None] >= index))
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[batch, query] == documents[batch, key])

        return cls(
            positions,
            create_block_mask(visible, len(documents), None, length, length, device=documents.device),
            _flex_attention(),
        )

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
        """As `scaled_dot_product_attention` of `q` [B, heads, T, head_dim], `k` and `v`."""
        if self.flex is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=grouped)
        return cast(Tensor, self.flex(q, k, v, block_mask=self.mask, enable_gqa=grouped))
