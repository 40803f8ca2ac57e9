"""Which hosts are paired in which round. A host is in at most one pair of a round: no two pairs share its bandwidth."""

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

Pair = tuple[int, int]  # two hosts, the lower one first; it is the one that measures
Round = tuple[Pair, ...]


def num_first_rounds(num_hosts: int) -> int:
    """Number of rounds for all hosts: every pair up to 4 hosts, then about log2 of the number of hosts."""
    if num_hosts < 2:
        return 0
    every_pair = num_hosts - 1 + num_hosts % 2
    return min(every_pair, max(3, math.ceil(math.log2(num_hosts)) - 1))


def num_second_rounds(num_hosts: int) -> int:
    """Number of rounds for suspects. With the first ones: log2(hosts), rounded up, + 2; one more for 3 and 4 hosts."""
    if num_hosts < 2:
        return 0
    return max(2, math.ceil(math.log2(num_hosts)) + 2 - num_first_rounds(num_hosts))


def first_rounds(num_hosts: int, *, seed: int) -> tuple[Round, ...]:
    """Rounds in which all hosts, of an odd number all but one, are paired, each time with another one. `seed` shuffles them."""
    places = list(range(num_hosts))
    random.Random(seed).shuffle(places)
    return tuple(islice(tournament(places), num_first_rounds(num_hosts)))


def tournament(hosts: Sequence[int]) -> Iterator[Round]:
    """Rounds in which each meets each other once. Source: the circle method of round-robin tournaments."""
    places = [*hosts, *[None] * (len(hosts) % 2)]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple(sorted(_pair(a, b) for a, b in facing if a is not None and b is not None))
        places[1:] = [places[-1], *places[1:-1]]


def second_rounds(
    *, hosts: Collection[int], links: Collection[Pair], good: Sequence[int], met: Collection[Pair], num: int
) -> tuple[Round, ...]:
    """Rounds in which suspects are measured again, twice where there is room, hosts first: `hosts` with `good` ones (not yet
    `met` if possible; without good hosts, a host they met), and suspicious `links` as they are."""
    rounds: list[dict[int, int]] = [{} for _ in range(num)]
    seen = Counter({_pair(*pair) for pair in met})
    # All suspects once before any a second time: a busy processor makes figures worse, and the best one counts.
    for _ in range(2):
        for host in sorted(hosts):
            # The places beside a suspect come first, so that suspects spread over the good hosts.
            ranked = sorted((seen[_pair(host, other)], (other - host) % (len(good) + 1), other) for other in good)
            partners = [_pair(host, other) for *_, other in ranked if other != host]
            if placed := _place(rounds, partners if good else sorted(pair for pair in seen if host in pair)[:1]):
                seen[placed] += 1
        for pair in sorted({_pair(*link) for link in links}):
            _place(rounds, [pair])
    found = [tuple(sorted({_pair(a, b) for a, b in paired.items()})) for paired in rounds]
    return tuple(pairs for pairs in found if pairs)


def contact_links(num_hosts: int, *, all_pairs: bool, num_distances: int | None = None) -> tuple[Pair, ...]:
    """Links to contact before any bytes flow, as (source, target), both directions: all of them, or those over distances of 1,
    2, 4, 8 and so on along the ring of hosts (the first `num_distances` of them)."""
    distances = range(1, num_hosts) if all_pairs else [1 << power for power in range(max(1, num_hosts).bit_length())]
    used = list(distances)[:num_distances]
    pairs = {(host, (host + distance) % num_hosts) for distance in used for host in range(num_hosts)}
    return tuple(sorted({link for a, b in pairs if a != b for link in ((a, b), (b, a))}))


def _place(rounds: list[dict[int, int]], pairs: Sequence[Pair]) -> Pair | None:
    """Put the first of these pairs that fits into the first round that has room; None if none has."""
    for paired in rounds:
        for a, b in pairs:
            if a not in paired and b not in paired:
                paired[a], paired[b] = b, a
                return a, b
    return None


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
