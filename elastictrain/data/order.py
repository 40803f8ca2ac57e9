"""Which sample stands at a position of the run: a seeded permutation per epoch, found in constant time.

Pure integer arithmetic, so the order is the same on every machine, Python and library version, and any position can be asked
for without those before it.

Source of the construction: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): a Feistel network over
[0, a) x [0, b) with a * b just above the number of samples, and cycle walking for the few values outside.
Source of the mixing function: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014), SplitMix64.
"""

from math import isqrt

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8


def _mix(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit affects every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _permute(value: int, *, size: int, key: int) -> int:
    """The image of `value` under the permutation of [0, size) that belongs to the 64-bit `key`."""
    width = isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        high, low = divmod(value, width)
        round_key = key
        for _ in range(_ROUNDS // 2):
            round_key = (round_key + _GOLDEN) & _MASK
            low = (low + _mix(high ^ round_key)) % width
            round_key = (round_key + _GOLDEN) & _MASK
            high = (high + _mix(low ^ round_key)) % height
        value = high * width + low
        # The network permutes [0, width * height); following a value until it is back below `size` permutes [0, size).
        if value < size:
            return value


def sample_at(position: int, *, num_samples: int, seed: int, shuffle: bool) -> int:
    """The sample at `position` of the run; each epoch of `num_samples` positions visits every sample once."""
    epoch, offset = divmod(position, num_samples)
    if not shuffle:
        return offset
    key = _mix((_mix((seed + _GOLDEN) & _MASK) + epoch * _GOLDEN) & _MASK)
    return _permute(offset, size=num_samples, key=key)
