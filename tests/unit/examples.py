"""How many examples a property is tried with."""

from hypothesis import settings

_USUAL = 100


def examples(number: int) -> int:
    """`number` in a usual run; HYPOTHESIS_PROFILE (see tests/conftest.py) makes it fewer or many more."""
    return max(1, number * settings().max_examples // _USUAL)
