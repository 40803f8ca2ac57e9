"""How far two tensors are apart. Pure."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_AT_ONCE = 1 << 18
"""Elements that are widened to 64 bits at once."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far values are apart from those of A. NaN equals NaN, and 0.0 equals -0.0."""

    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    """Largest |A - B|; infinite where only one of them is NaN."""

    scale: float = 0.0
    """Largest finite |A|."""

    @property
    def relative(self) -> float:
        """`max_abs` / `scale`."""
        if not self.differing:
            return 0.0
        return self.max_abs / self.scale if self.scale else math.inf

    def plus(self, other: "Difference") -> "Difference":
        """Of two parts of a tensor together."""
        return Difference(
            self.elements + other.elements,
            self.differing + other.differing,
            max(self.max_abs, other.max_abs),
            max(self.scale, other.scale),
        )


def difference(a: Tensor, b: Tensor) -> Difference:
    """Of two tensors of one shape and element type, on the CPU."""
    total = Difference()
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    floating = a.is_floating_point() or a.is_complex()
    for begin in range(0, flat_a.numel(), _AT_ONCE):
        part_a, part_b = flat_a[begin : begin + _AT_ONCE], flat_b[begin : begin + _AT_ONCE]
        total = total.plus(_of_floats(part_a, part_b) if floating else _of_integers(part_a, part_b))
    return total


def _of_floats(a: Tensor, b: Tensor) -> Difference:
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    differs = ~((x == y) | (x.isnan() & y.isnan()))
    sizes = x.abs()
    finite = sizes[sizes.isfinite()]
    apart = (x - y).abs()[differs].nan_to_num(nan=math.inf, posinf=math.inf)
    return Difference(
        elements=x.numel(),
        differing=int(differs.sum()),
        max_abs=float(apart.max()) if apart.numel() else 0.0,
        scale=float(finite.max()) if finite.numel() else 0.0,
    )


def _of_integers(a: Tensor, b: Tensor) -> Difference:
    x, y = (one.to(torch.uint8).numpy() if one.dtype == torch.bool else one.numpy() for one in (a, b))
    # Modulo 2^64 the difference of greater and smaller is exact for every integer type.
    apart = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    return Difference(
        elements=x.size,
        differing=int(np.count_nonzero(apart)),
        max_abs=float(apart.max(initial=0)),
        scale=float(max(abs(int(x.min())), abs(int(x.max())))),
    )
