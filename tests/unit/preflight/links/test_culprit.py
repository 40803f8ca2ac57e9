from collections.abc import Mapping

import pytest

from elastictrain.preflight.links.culprit import BrokenLinks, Culprit, Direction, LinkBlame, best_of, find_broken
from elastictrain.preflight.links.culprit import blame as blame_figures
from elastictrain.preflight.links.messages import Link
from tests.unit.preflight.links.made import all_links


def too_slow(figure: float, typical: float) -> bool:
    return figure < 0.5 * typical


def values(num_hosts: int, slow: set[Link], *, figure: float = 1.0) -> dict[Link, float]:
    return {link: figure if link in slow else 10.0 for link in all_links(num_hosts)}


def blame(figures: Mapping[Link, float], *, directed: bool = True) -> LinkBlame:
    return blame_figures(figures.items(), too_bad=too_slow, directed=directed)


def blame_twice(first: Mapping[Link, float], second: Mapping[Link, float], *, excused: Mapping[Link, float]) -> LinkBlame:
    return blame_figures([*first.items(), *second.items()], too_bad=too_slow, excused=excused.items())


SENT = {(2, 0), (2, 1)}
RECEIVED = {(0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("slow", "way"),
    [(SENT | RECEIVED, Direction.BOTH), (SENT, Direction.OUT), (RECEIVED, Direction.IN)],
    ids=["both", "sent", "received"],
)
def test_a_slow_host_is_named_with_its_direction(slow: set[Link], way: Direction) -> None:
    found = blame(values(3, slow))
    assert found.hosts == (Culprit(2, 1.0, way),)
    assert found.links == ()
    assert found.typical == 10.0


def test_the_figure_of_a_slow_host_is_that_of_its_better_direction() -> None:
    assert blame({**values(3, SENT | RECEIVED), **dict.fromkeys(RECEIVED, 2.0)}).hosts == (Culprit(2, 2.0, Direction.BOTH),)
    assert blame({**values(3, SENT | RECEIVED), **dict.fromkeys(SENT, 2.0)}).hosts == (Culprit(2, 2.0, Direction.BOTH),)


def test_typical_is_the_median_of_what_hosts_send_and_receive() -> None:
    # Sent: 2, 4 and 9. Received: 9.
    assert blame({(0, 3): 2.0, (1, 3): 4.0, (2, 3): 9.0}).typical == 6.5


def test_hosts_count_that_only_send_or_only_receive() -> None:
    assert blame({(0, 3): 10.0, (1, 3): 10.0, (2, 3): 1.0}).hosts == (Culprit(2, 1.0, Direction.OUT),)
    assert blame({(3, 0): 10.0, (3, 1): 10.0, (3, 2): 1.0}).hosts == (Culprit(2, 1.0, Direction.IN),)


def test_several_slow_hosts_are_named_in_order() -> None:
    hosts, slow = (64, 2, 5, *range(10, 24)), {2, 5, 64}
    figures = {(a, b): 0.1 if slow & {a, b} else 1.0 for a in hosts for b in hosts if a != b}
    assert [culprit.subject for culprit in blame(figures).hosts] == sorted(slow)


def test_a_slow_link_between_good_hosts_is_named_with_its_direction() -> None:
    found = blame(values(3, {(2, 0)}))
    assert (found.hosts, found.links) == ((), (Culprit((2, 0), 1.0),))


def test_nobody_is_to_blame_among_equals() -> None:
    assert blame(values(4, set())).links == ()
    assert blame(values(4, set(all_links(4)))).hosts == ()
    assert blame({}).typical is None


def test_without_directions_a_host_is_only_to_blame_if_nothing_of_it_is_good() -> None:
    assert blame(values(3, SENT), directed=False).hosts == blame(values(3, RECEIVED), directed=False).hosts == ()
    assert blame(values(3, SENT | RECEIVED), directed=False).hosts == (Culprit(2, 1.0, Direction.BOTH),)


def test_two_hosts_cannot_outvote_each_other() -> None:
    both = {(0, 1): 1.0, (1, 0): 1.0}
    assert blame(both).links == ()
    assert [bad.subject for bad in blame({(0, 1): 1.0, (1, 0): 9.0}).links] == [(0, 1)]


def test_a_second_figure_clears_and_a_missing_one_leaves_unconfirmed() -> None:
    first = values(4, {(0, 1), (2, 3)})
    cleared = blame_twice(first, {(0, 1): 9.0, (2, 3): 1.2}, excused={(0, 1): 9.0, (2, 3): 1.2})
    assert cleared.links == (Culprit((2, 3), 1.2),)
    doubtful = blame_twice(first, {}, excused={})
    assert [bad.confirmed for bad in doubtful.links] == [False, False]


def test_a_host_is_confirmed_when_it_was_measured_again() -> None:
    first = values(3, SENT)
    assert not blame_twice(first, {}, excused={}).hosts[0].confirmed
    assert blame_twice(first, {(2, 0): 1.0, (0, 2): 10.0}, excused={(2, 0): 1.0}).hosts == (Culprit(2, 1.0, Direction.OUT),)
    assert blame_twice(first, {(2, 0): 9.0}, excused={(2, 0): 9.0}).hosts == ()


@pytest.mark.parametrize(
    ("again", "confirmed"), [([(2, 0)], False), ([(0, 2)], False), ([(2, 0), (1, 2)], True)], ids=["sent", "received", "both"]
)
def test_one_direction_does_not_confirm_the_other(again: list[Link], confirmed: bool) -> None:
    second = dict.fromkeys(again, 1.0)
    found = blame_twice(values(3, SENT | RECEIVED), second, excused=second)
    assert found.hosts == (Culprit(2, 1.0, Direction.BOTH, confirmed=confirmed),)


@pytest.mark.parametrize(
    ("slow", "way", "again"), [(SENT, Direction.OUT, (0, 2)), (RECEIVED, Direction.IN, (2, 0))], ids=["sent", "received"]
)
def test_a_slow_direction_is_confirmed_by_itself_alone(slow: set[Link], way: Direction, again: Link) -> None:
    """The second figure is of the direction that was good, and bad now."""
    found = blame_twice(values(3, slow), {again: 1.0}, excused={again: 1.0})
    assert found.hosts == (Culprit(2, 1.0, way, confirmed=False),)


def test_who_has_an_excuse_stays_unconfirmed() -> None:
    first = values(3, SENT)
    found = blame_twice(first, {(2, 0): 1.0}, excused={(2, 0): 6.0})
    assert found.hosts == (Culprit(2, 1.0, Direction.OUT, confirmed=False),)
    slow_link = blame_twice(values(3, {(0, 1)}), {(0, 1): 1.0}, excused={(0, 1): 6.0})
    assert slow_link.links == (Culprit((0, 1), 1.0, confirmed=False),)


def test_best_of_keeps_the_best() -> None:
    assert best_of([((0, 1), 1.0), ((0, 1), 3.0), ((0, 1), 2.0)]) == {(0, 1): 3.0}


def test_what_is_broken_is_named_once() -> None:
    tried, both = all_links(3), ((0, 2), (1, 2), (2, 0), (2, 1))
    assert find_broken([], tried=tried) == find_broken([], tried=[]) == []
    assert find_broken(tried, tried=tried) == [BrokenLinks(None, tuple(tried))]
    assert find_broken(SENT, tried=tried) == [BrokenLinks(2, ((2, 0), (2, 1)), Direction.OUT)]
    assert find_broken(RECEIVED, tried=tried) == [BrokenLinks(2, ((0, 2), (1, 2)), Direction.IN)]
    assert find_broken(SENT | RECEIVED, tried=tried) == [BrokenLinks(2, both, Direction.BOTH)]
    assert find_broken({(2, 0)}, tried=tried) == [BrokenLinks((2, 0), ((2, 0),))]
    more = {(2, 0), (2, 1), (2, 3), (0, 1)}
    named = [BrokenLinks(2, ((2, 0), (2, 1), (2, 3)), Direction.OUT), BrokenLinks((0, 1), ((0, 1),))]
    assert find_broken(more, tried=all_links(4)) == named


def test_of_two_hosts_only_links_are_broken() -> None:
    assert [one.subject for one in find_broken(all_links(2), tried=all_links(2))] == [(0, 1), (1, 0)]
