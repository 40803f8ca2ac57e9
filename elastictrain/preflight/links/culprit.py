"""From measurements of links to who is to blame: a host by its best link against the median, else the link.

All figures are such that higher is better. A host that is slow makes all its links slow; one that is not has at least one
good link among those that were measured. So a host's score is its *best* link, per direction.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from elastictrain.preflight.links.messages import Link

K = TypeVar("K")
S = TypeVar("S", bound=int | Link)

TooBad = Callable[[float, float], bool]
"""Whether a figure (first) is too bad against what is typical (second)."""


class Way(StrEnum):
    """Which traffic of a host suffers."""

    OUT = "sent"
    IN = "received"
    BOTH = "both ways"


_WAYS = {(0,): Way.OUT, (1,): Way.IN, (0, 1): Way.BOTH}
"""By the ends of links at which the host suffers."""


@dataclass(frozen=True, slots=True)
class Culprit(Generic[S]):
    """A host that is to blame, or a link between two that are not. `figure`: its best in that direction. `confirmed`: it was
    measured a second time, and well."""

    subject: S
    figure: float
    way: Way = Way.BOTH
    confirmed: bool = True


@dataclass(frozen=True, slots=True)
class LinkBlame:
    """Who is to blame. `typical`: what figures were held against; None if there are none."""

    hosts: tuple[Culprit[int], ...] = ()
    links: tuple[Culprit[Link], ...] = ()
    typical: float | None = None


def best_of(figures: Iterable[tuple[K, float]]) -> dict[K, float]:
    """The best figure of each: chance makes it slower, never faster."""
    found: dict[K, float] = {}
    for key, figure in figures:
        found[key] = max(figure, found.get(key, figure))
    return found


def blame(
    figures: Iterable[tuple[Link, float]],
    *,
    too_bad: TooBad,
    directed: bool = True,
    excused: Iterable[tuple[Link, float]] | None = None,
) -> LinkBlame:
    """Who looks guilty by the best figure of each link.

    `directed`: whether the two directions of a link differ, so that a host may be to blame for one of them. Two hosts cannot
    outvote each other: their links are held against the better direction, and no host is named. `excused`: what was measured a
    second time, with all that speaks for the link: what is not bad by these, or has none, stays unconfirmed.
    """
    values = best_of(figures)
    if not values:
        return LinkBlame()
    scores = _scores(values)
    slow: tuple[dict[int, float], ...] = ({}, {})
    if len(scores[0].keys() | scores[1].keys()) < 3:
        typical = max(values.values())
    else:
        if not directed:
            scores = (best_of([*scores[0].items(), *scores[1].items()]),) * 2
        typical = statistics.median([*scores[0].values(), *scores[1].values()])
        slow = tuple({host: score for host, score in ends.items() if too_bad(score, typical)} for ends in scores)
    second = None if excused is None else best_of(excused)
    second_scores = _scores(second or {})

    def is_bad(figure: float | None) -> bool:
        return figure is not None and too_bad(figure, typical)

    hosts = []
    for host in sorted(slow[0].keys() | slow[1].keys()):
        ends = tuple(end for end in (0, 1) if host in slow[end])
        confirmed = second is None or all(is_bad(second_scores[end].get(host)) for end in ends)
        hosts.append(Culprit(host, max(slow[end][host] for end in ends), _WAYS[ends], confirmed))
    bad = sorted(link for link in values if is_bad(values[link]) and link[0] not in slow[0] and link[1] not in slow[1])
    links = [Culprit(link, values[link], confirmed=second is None or is_bad(second.get(link))) for link in bad]
    return LinkBlame(tuple(hosts), tuple(links), typical)


@dataclass(frozen=True, slots=True)
class Broken:
    """What does not work at all, not just badly: a host, a link, or None where no link that was tried works. `links`: the bad
    ones of it."""

    subject: int | Link | None
    links: tuple[Link, ...]
    way: Way = Way.BOTH


def find_broken(bad: Collection[Link], *, tried: Collection[Link]) -> list[Broken]:
    """Hosts all of whose links (two at least), in a direction or in both, are among the bad ones, and the other bad links."""
    bad = sorted(bad)
    if len({host for link in tried for host in link}) > 2 and set(tried) <= set(bad):
        return [Broken(None, tuple(bad))]
    dead: list[set[int]] = []
    for end in (0, 1):
        num_tried, num_bad = (Counter(link[end] for link in links) for links in (tried, bad))
        dead.append({host for host, num in num_tried.items() if num >= 2 and num_bad[host] == num})
    found = [
        Broken(host, tuple(link for link in bad if host in link), _WAYS[tuple(end for end in (0, 1) if host in dead[end])])
        for host in sorted(dead[0] | dead[1])
    ]
    return found + [Broken(link, (link,)) for link in bad if link[0] not in dead[0] and link[1] not in dead[1]]


def _scores(values: dict[Link, float]) -> tuple[dict[int, float], ...]:
    """Of each host, by what it sends and by what it receives."""
    return tuple(best_of((link[end], value) for link, value in values.items()) for end in (0, 1))
