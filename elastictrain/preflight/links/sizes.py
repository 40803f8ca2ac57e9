"""Sizes as the classic speed test writes them: `64M`, `10G`."""

import re
from decimal import Decimal

from elastictrain.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)

MOST_BYTES = 1 << 50


def parse_size(text: str) -> int:
    """Bytes; units are powers of 1024: `64M` is 67108864. Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a size must be a number with K, M, G or T, such as 64M or 10G, but is {text!r}")
    num_bytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if not 1 <= num_bytes <= MOST_BYTES:
        raise UsageError(f"a size must be from 1 byte to 1024T, but is {text!r}")
    return num_bytes
