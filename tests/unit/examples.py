"""How many examples a property is tried with."""

from hypothesis import settings

_USUAL = 100


def examples(number: int) -> int:
    """`number` in a usual run; with HYPOTHESIS_PROFILE=thorough 50 times as many (see tests/conftest.py)."""
    return max(1, number * settings().max_examples // _USUAL)
