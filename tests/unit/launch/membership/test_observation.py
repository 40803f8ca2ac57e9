from dataclasses import replace

from elastictrain.launch.membership.observation import HostObservation, observe, outdated
from elastictrain.launch.membership.records import HostRecord, HostState
from tests.unit.launch.membership.made import record

LINE = record("b")


def after(*looks: tuple[float, HostRecord | None]) -> HostObservation | None:
    """What is seen of one host after lines that were read at those times; None: its line could not be read."""
    observed: dict[str, HostObservation] = {}
    for now_s, line in looks:
        observed = observe(observed, [line] if line is not None else [], own="a", now_s=now_s)
    return observed.get("b")


def test_the_own_line_is_left_out() -> None:
    assert observe({}, [record("a"), LINE], own="a", now_s=1.0) == {
        "b": HostObservation(LINE, 1.0, fresh=False, since_s=1.0, hears_since_s=1.0)
    }


def test_a_line_that_was_read_once_may_be_a_leftover() -> None:
    assert after((1.0, LINE), (9.0, LINE)) == HostObservation(LINE, 1.0, fresh=False, since_s=1.0, hears_since_s=1.0)


def test_a_beat_that_grows_is_a_sign_of_life() -> None:
    later = replace(LINE, beat=2)
    assert after((1.0, LINE), (2.0, later), (3.0, later)) == HostObservation(
        later, 2.0, fresh=True, since_s=1.0, hears_since_s=1.0
    )


def test_what_it_says_of_itself_dates_from_when_it_was_seen_to_change() -> None:
    busy = replace(LINE, beat=2, state=HostState.BUSY)
    ended = replace(LINE, beat=4, state=HostState.BUSY, ended=1)
    assert after((1.0, LINE), (2.0, busy), (3.0, replace(busy, beat=3))) == HostObservation(
        replace(busy, beat=3), 3.0, fresh=True, since_s=2.0, hears_since_s=1.0
    )
    found = after((1.0, LINE), (2.0, busy), (4.0, ended))
    assert found is not None
    assert found.since_s == 4.0
    # Another port or reason is the same state.
    found = after((1.0, LINE), (2.0, replace(LINE, beat=2, master_port=1, reason="?")))
    assert found is not None
    assert found.since_s == 1.0


def test_whom_it_hears_dates_from_when_that_was_seen_to_change() -> None:
    deaf = replace(LINE, beat=2, hears=())
    found = after((1.0, LINE), (2.0, deaf), (3.0, replace(deaf, beat=3)))
    assert found is not None
    assert (found.hears_since_s, found.since_s) == (2.0, 1.0)


def test_an_older_line_says_nothing() -> None:
    newer = replace(LINE, beat=5, state=HostState.BUSY)
    observed = after((1.0, LINE), (2.0, newer))
    assert after((1.0, LINE), (2.0, newer), (3.0, replace(LINE, beat=4))) == observed
    assert after((1.0, LINE), (2.0, newer), (3.0, replace(LINE, beat=5))) == observed


def test_a_line_that_cannot_be_read_is_left_as_it_was() -> None:
    assert after((1.0, LINE), (2.0, None), (3.0, None)) == after((1.0, LINE))


def test_a_line_that_is_gone_is_forgotten_in_the_end() -> None:
    assert after((1.0, LINE), (3600.0, None)) is not None
    assert after((1.0, LINE), (3601.0, None)) is None


def test_a_line_that_is_there_is_remembered_however_long_nobody_looked() -> None:
    """The first host of a group alone reads while it trains; what the others saw before must not look new to them then."""
    assert after((1.0, LINE), (9000.0, LINE), (18000.0, LINE)) == HostObservation(
        LINE, 1.0, fresh=False, since_s=1.0, hears_since_s=1.0
    )
    later = replace(LINE, beat=2)
    assert after((1.0, LINE), (9000.0, later)) == HostObservation(later, 9000.0, fresh=True, since_s=1.0, hears_since_s=1.0)


def test_what_was_seen_before_is_not_changed() -> None:
    before = observe({}, [LINE], own="a", now_s=1.0)
    observe(before, [replace(LINE, beat=2)], own="a", now_s=2.0)
    assert before == {"b": HostObservation(LINE, 1.0, fresh=False, since_s=1.0, hears_since_s=1.0)}


def test_lines_that_nobody_needs_any_more() -> None:
    gone = replace(record("c"), state=HostState.GONE)
    observed = observe({}, [LINE, gone], own="a", now_s=0.0)
    kept_s = {host: next(now_s for now_s in range(0, 100_000, 60) if host in outdated(observed, now_s=now_s)) for host in "bc"}
    # Who has said that it left is not missed for long; who is only silent may be frozen, and come back.
    assert 60 < kept_s["c"] < kept_s["b"]
    assert kept_s["b"] > 1800
    later = observe(observed, [replace(LINE, beat=2)], own="a", now_s=90_000.0)
    assert "b" not in outdated(later, now_s=90_000.0)
