"""From measurements of links to who is to blame: a host by its best link against the median, else the link.

All figures are such that higher is better. A host that is slow makes all its links slow; one that is not has at least one
good link among those that were measured. So a host's score is its *best* link, per direction.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastictrain.preflight.links.messages import Link

TooBad = Callable[[float, float], bool]
"""Whether a figure (first) is too bad against what is typical (second)."""


class Way(StrEnum):
    """Which traffic of a host suffers."""

    OUT = "sent"
    IN = "received"
    BOTH = "both ways"


@dataclass(frozen=True, slots=True)
class Culprit:
    """A host that is to blame, with its best figure in that direction. `confirmed`: it was measured a second time, and well."""

    host: int
    way: Way
    score: float
    confirmed: bool = True


@dataclass(frozen=True, slots=True)
class BadLink:
    """A link that is to blame, between two hosts that are not."""

    link: Link
    value: float
    confirmed: bool = True


@dataclass(frozen=True, slots=True)
class LinkBlame:
    """Who is to blame. `typical`: what figures were held against; None if there are none."""

    hosts: tuple[Culprit, ...] = ()
    links: tuple[BadLink, ...] = ()
    typical: float | None = None

    def only_confirmed(self) -> "LinkBlame":
        """Without what was measured only once."""
        return replace(
            self,
            hosts=tuple(culprit for culprit in self.hosts if culprit.confirmed),
            links=tuple(bad for bad in self.links if bad.confirmed),
        )


def best_of(figures: Iterable[tuple[Link, float]]) -> dict[Link, float]:
    """The best figure of each link: chance makes it slower, never faster."""
    found: dict[Link, float] = {}
    for link, figure in figures:
        found[link] = max(figure, found.get(link, figure))
    return found


def blame(values: Mapping[Link, float], *, too_bad: TooBad, directed: bool = True) -> LinkBlame:
    """Who looks guilty by these figures.

    `directed`: whether the two directions of a link differ, so that a host may be to blame for one of them. Two hosts cannot
    outvote each other: their links are held against the better direction, and no host is named.
    """
    leaving, coming = _scores(values, end=0), _scores(values, end=1)
    if len(leaving.keys() | coming.keys()) < 3:
        typical = max(values.values(), default=None)
        return LinkBlame((), _links(values, typical, too_bad, out=(), into=()), typical)
    if not directed:
        leaving = coming = {
            host: max(scores[host] for scores in (leaving, coming) if host in scores) for host in leaving.keys() | coming.keys()
        }
    typical = statistics.median([*leaving.values(), *coming.values()])
    out = {host: score for host, score in leaving.items() if too_bad(score, typical)}
    into = {host: score for host, score in coming.items() if too_bad(score, typical)}
    hosts = [_culprit(host, out.get(host), into.get(host)) for host in sorted(out.keys() | into.keys())]
    return LinkBlame(tuple(hosts), _links(values, typical, too_bad, out=out, into=into), typical)


def blame_twice(
    first: Mapping[Link, float],
    second: Mapping[Link, float],
    *,
    excused: Mapping[Link, float],
    too_bad: TooBad,
    directed: bool = True,
) -> LinkBlame:
    """Who is to blame after suspects were measured a second time: the better of both figures counts.

    `excused`: of the second time, with all that speaks for the link. What is not bad by these, or has none, stays unconfirmed.
    """
    found = blame(best_of([*first.items(), *second.items()]), too_bad=too_bad, directed=directed)
    again = [_scores(excused, end=end) for end in (0, 1)]

    def is_bad(figure: float | None) -> bool:
        return figure is not None and found.typical is not None and too_bad(figure, found.typical)

    return replace(
        found,
        hosts=tuple(
            replace(culprit, confirmed=all(is_bad(again[end].get(culprit.host)) for end in _ends(culprit)))
            for culprit in found.hosts
        ),
        links=tuple(replace(bad, confirmed=is_bad(excused.get(bad.link))) for bad in found.links),
    )


@dataclass(frozen=True, slots=True)
class Broken:
    """What does not work at all, not just badly. `everything`: no link that was tried works; nothing else is named then."""

    everything: bool = False
    hosts: tuple[tuple[int, Way], ...] = ()
    links: tuple[Link, ...] = ()


def find_broken(bad: Collection[Link], *, tried: Collection[Link]) -> Broken:
    """Hosts all of whose links (two at least), in a direction or in both, are among the bad ones, and the other bad links."""
    members = {host for link in tried for host in link}
    if len(members) > 2 and set(tried) <= set(bad):
        return Broken(everything=True)
    out = _all_bad(bad, tried, end=0)
    into = _all_bad(bad, tried, end=1)
    links = tuple(sorted(link for link in bad if link[0] not in out and link[1] not in into))
    hosts = tuple((host, _way(host in out, host in into)) for host in sorted(out | into))
    return Broken(hosts=hosts, links=links)


def _ends(culprit: Culprit) -> list[int]:
    """At which end of links the host is slow."""
    return [end for end, other in ((0, Way.IN), (1, Way.OUT)) if culprit.way is not other]


def _all_bad(bad: Collection[Link], tried: Collection[Link], *, end: int) -> set[int]:
    num_tried, num_bad = _counts(tried, end=end), _counts(bad, end=end)
    return {host for host, num in num_tried.items() if num >= 2 and num_bad.get(host) == num}


def _counts(links: Collection[Link], *, end: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for link in links:
        found[link[end]] = found.get(link[end], 0) + 1
    return found


def _scores(values: Mapping[Link, float], *, end: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for link, value in values.items():
        found[link[end]] = max(value, found.get(link[end], value))
    return found


def _links(
    values: Mapping[Link, float], typical: float | None, too_bad: TooBad, *, out: Collection[int], into: Collection[int]
) -> tuple[BadLink, ...]:
    if typical is None:
        return ()
    bad = [link for link, value in values.items() if too_bad(value, typical) and link[0] not in out and link[1] not in into]
    return tuple(BadLink(link, values[link]) for link in sorted(bad))


def _culprit(host: int, sent: float | None, received: float | None) -> Culprit:
    score = max(figure for figure in (sent, received) if figure is not None)
    return Culprit(host, _way(sent is not None, received is not None), score)


def _way(sends_badly: bool, receives_badly: bool) -> Way:
    return Way.BOTH if sends_badly and receives_badly else Way.OUT if sends_badly else Way.IN
