"""Sizes as people read them."""

MIB = 1 << 20
GIB = 1 << 30


def in_gib(num_bytes: float) -> float:
    """Bytes as GiB with three significant digits."""
    return float(f"{num_bytes / GIB:.3g}")
