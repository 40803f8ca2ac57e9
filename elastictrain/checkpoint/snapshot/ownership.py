"""Who of several ranks that hold the same bytes writes them. Pure, and free of torch: every rank decides for itself."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece of state that `replicas` ranks hold alike, of which this rank is number `replica`."""

    name: str
    size_bytes: int
    replicas: int
    replica: int


def choose_own(copies: Sequence[Copy]) -> list[bool]:
    """For each copy whether this rank writes it: exactly one of its replicas does, and their loads are even.

    Ranks that share copies must list the same ones: then no word between them is needed, at any world size.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, copy in enumerate(copies):
        groups[(copy.replicas, copy.replica)].append(index)
    own = [False] * len(copies)
    for (replicas, replica), indices in groups.items():
        loads = [(0, number) for number in range(replicas)]
        for index in sorted(indices, key=lambda i: (-copies[i].size_bytes, copies[i].name)):
            load, number = heapq.heappop(loads)
            own[index] = number == replica
            # A piece without bytes counts, too, or all such pieces would go to one rank.
            heapq.heappush(loads, (load + max(1, copies[index].size_bytes), number))
    return own
