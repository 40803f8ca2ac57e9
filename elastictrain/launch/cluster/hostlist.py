"""Slurm's short forms of lists: hosts (`gpu[001-003,7],login1`) and counts for each of them (`4(x2),3`). Pure; no scontrol."""

import re
from collections.abc import Iterator
from itertools import product
from math import prod

_MOST = 65536
"""More hosts than any cluster has: a longer list is a mistake, and would only fill memory."""

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts in Slurm's order; the last group of brackets counts fastest, and the first number of a range gives the width.

    Raises: ValueError with what is wrong, to follow "must be a list of hosts like gpu[001-003,7],login1".
    """
    hosts: list[str] = []
    for expression in _split(text):
        choices = list(_choices(expression))
        if len(hosts) + prod(len(choice) for choice in choices) > _MOST:
            raise ValueError(f"names more than {_MOST} hosts")
        hosts.extend("".join(parts) for parts in product(*choices))
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """One number for each host.

    Raises: ValueError with what is wrong, to follow "must be numbers like 4(x2),3".
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is no number")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST:
            raise ValueError(f"is for more than {_MOST} hosts")
        counts.extend([int(match[1])] * times)
    return tuple(counts)


def _split(text: str) -> Iterator[str]:
    """At the commas outside brackets."""
    start, depth = 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _choices(expression: str) -> Iterator[tuple[str, ...]]:
    position = 0
    while position < len(expression):
        match = _PART.match(expression, position)
        if match is None:
            raise ValueError(f"{expression!r} is no host")
        yield (match[2],) if match[2] is not None else tuple(_numbers(match[1]))
        position = match.end()
    if not position:
        raise ValueError("a name is empty")


def _numbers(ranges: str) -> Iterator[str]:
    total = 0
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in brackets is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {item!r} runs backwards")
        total += last - first + 1
        if total > _MOST:
            raise ValueError(f"names more than {_MOST} hosts")
        yield from (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
