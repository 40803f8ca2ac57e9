"""From measurements of links to the culprit: a host by its best link against the median, else the link. Higher is better. All
links of a slow host are slow; any other host has a good link among the measured ones. So its *best* link counts, each way."""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from elastictrain.preflight.links.messages import Link

K = TypeVar("K")
S = TypeVar("S", bound=int | Link)

TooBad = Callable[[float, float], bool]  # whether a figure (first) is too bad against what is typical (second)


class Direction(StrEnum):
    OUT = "sent"
    IN = "received"
    BOTH = "both ways"


_WAYS = {(0,): Direction.OUT, (1,): Direction.IN, (0, 1): Direction.BOTH}  # keys: the ends of a link at which the host is bad


@dataclass(frozen=True, slots=True)
class Culprit(Generic[S]):
    """A bad host, or a bad link between two good hosts."""

    subject: S
    figure: float  # best figure in that direction
    way: Direction = Direction.BOTH
    confirmed: bool = True  # a second measurement confirms it


@dataclass(frozen=True, slots=True)
class LinkBlame:
    hosts: tuple[Culprit[int], ...] = ()
    links: tuple[Culprit[Link], ...] = ()
    typical: float | None = None  # the figures were compared with this; None: no figures


def best_of(figures: Iterable[tuple[K, float]]) -> dict[K, float]:
    """The best figure of each key. Chance makes a link slower, never faster."""
    found: dict[K, float] = {}
    for key, figure in figures:
        found[key] = max(figure, found.get(key, figure))
    return found


def blame(
    figures: Iterable[tuple[Link, float]],
    *,
    too_bad: TooBad,
    directed: bool = True,
    least_links: int = 1,
    excused: Iterable[tuple[Link, float]] | None = None,
) -> LinkBlame:
    """Find bad hosts and links by the best figure of each link; `directed`: a host may be bad in one direction. Of two hosts
    none is named: links are compared with the better direction; nor is one of fewer than `least_links`. `excused`: figures of a
    second measurement, raised to what enough processor time might have brought: only what is bad by these is confirmed."""
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
        num = [Counter(link[end] for link in values) for end in (0, 1)]
        slow = tuple(
            {host: score for host, score in scores[end].items() if num[end][host] >= least_links and too_bad(score, typical)}
            for end in (0, 1)
        )
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
class BrokenLinks:
    """What does not work at all: a host, a link, or None if no link that was tried works."""

    subject: int | Link | None
    links: tuple[Link, ...]  # the bad links of the subject
    way: Direction = Direction.BOTH


def find_broken(bad: Collection[Link], *, tried: Collection[Link]) -> list[BrokenLinks]:
    """Hosts with at least two links of which all are bad, in one direction or both; then the other bad links."""
    bad = sorted(bad)
    if len({host for link in tried for host in link}) > 2 and set(tried) <= set(bad):
        return [BrokenLinks(None, tuple(bad))]
    figures = [(link, float(link not in bad)) for link in tried]
    found = blame(figures, too_bad=lambda figure, _: figure < 1.0, least_links=2)
    hosts = [BrokenLinks(one.subject, tuple(link for link in bad if one.subject in link), one.way) for one in found.hosts]
    return hosts + [BrokenLinks(one.subject, (one.subject,)) for one in found.links]


def _scores(values: dict[Link, float]) -> tuple[dict[int, float], ...]:
    """Best figure of each host, for sending and for receiving."""
    return tuple(best_of((link[end], value) for link, value in values.items()) for end in (0, 1))
