"""Each second of each worker has exactly one cause; three runs are counted by hand."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.report.history import EventReader, History
from elastictrain.report.ledger import Segment, TimeCause, attribute
from elastictrain.report.summary import summarize
from elastictrain.storage.opening import open_store
from tests.unit.examples import examples
from tests.unit.report.events import Written, killed, lost_host, undisturbed


def seconds_of(run: Written) -> dict[TimeCause, float]:
    return {cause: round(value, 3) for cause, value in summarize(run.history(), url="run").seconds.items()}


def test_an_undisturbed_run_counted_by_hand() -> None:
    # The first of five steps took 3 s, of which one is that of a usual step.
    expected = {
        TimeCause.STARTUP: 6.0,
        TimeCause.RENDEZVOUS: 1.0,
        TimeCause.PREFLIGHT: 3.0,
        TimeCause.RESTORE: 2.0,
        TimeCause.WARM_UP: 2.25,
        TimeCause.DATA: 0.25,
        TimeCause.EVALUATION: 2.0,
        TimeCause.SAVE: 2.0,
        TimeCause.USEFUL: 0.75 + 1.0 + 0.75 + 1.0 + 1.0,
        TimeCause.DRAIN: 2.0,
    }
    assert seconds_of(undisturbed()) == expected


def test_a_killed_worker_counted_by_hand() -> None:
    expected = {
        TimeCause.WAITING: 2 * (2.0 + 0.5),
        TimeCause.STARTUP: 2 * (3.0 + 0.25),
        TimeCause.RENDEZVOUS: 2 * (1.0 + 0.25),
        TimeCause.PREFLIGHT: 2 * 2.0,
        TimeCause.RESTORE: 2 * (1.0 + 0.5),
        TimeCause.USEFUL: 2 * (4.0 + 2.0),
        TimeCause.FAILURE: 2 * 1.0,
        TimeCause.WARM_UP: 2 * 1.0,
        TimeCause.REPEATED: 2 * 1.0,
        TimeCause.DRAIN: 2 * 1.0,
    }
    assert seconds_of(killed()) == expected
    report = summarize(killed().history(), url="run")
    assert report.worker_s == pytest.approx(2 * 20.5)
    assert report.goodput == pytest.approx(12 / 41)
    assert (report.steps, report.new_steps, report.repeated_steps, report.tokens) == (6, 6, 1, 240.0)
    assert report.costs(3600.0).per_step == pytest.approx(41 / 6)


LOST_HOST = {
    # a for 2 s and b for 1 s; then a between the generations; then b when it is back, and both.
    TimeCause.WAITING: 3.0 + 1.0 + 2.0 + 2.0,
    # b from its loss to its return.
    TimeCause.ABSENT: 4.0,
    TimeCause.STARTUP: 2 * 1.0 + 1.0 + 2 * 1.0,
    TimeCause.RENDEZVOUS: 2 * 1.0,
    TimeCause.RESTORE: 2 * 1.0,
    TimeCause.USEFUL: 2 * 3.0 + 3.0 + 2 * 3.0,
    TimeCause.FAILURE: 2 * 4.0,
    TimeCause.DRAIN: 1.0 + 2 * 1.0,
}


@pytest.mark.parametrize("clock_off", [0.0, 1.0, 30.0, -3600.0])
def test_a_lost_host_counted_by_hand(clock_off: float) -> None:
    found = seconds_of(lost_host(clock_off=clock_off))
    # A second is as near as launchers begin a generation together.
    assert found == LOST_HOST if clock_off != 1.0 else found[TimeCause.USEFUL] == LOST_HOST[TimeCause.USEFUL]


def test_a_host_that_was_frozen_is_absent_until_it_speaks() -> None:
    run = lost_host()
    # It thaws, finds that its generation is over, and is killed; its successor comes at 16.
    run.end(15.0, "b-2", 1, "lost", lost="a-1")
    found = seconds_of(run)
    assert found[TimeCause.ABSENT] == LOST_HOST[TimeCause.ABSENT] - 1.0
    assert found[TimeCause.WAITING] == LOST_HOST[TimeCause.WAITING] + 1.0


def test_lines_that_are_there_twice_count_once() -> None:
    run = undisturbed()
    for lines in run.lines.values():
        lines[:] = [line for line in lines for _ in range(2)]
    assert seconds_of(run) == seconds_of(undisturbed())


def test_a_generation_that_never_started_is_charged_to_the_phase_in_which_it_ended() -> None:
    run = Written()
    run.begin(0.0, "a-1", 1, 2, ("a",))
    run.end(5.0, "a-1", 1, "failed", phase="rendezvous")
    assert seconds_of(run) == {TimeCause.RENDEZVOUS: 10.0}


def test_an_open_end_is_unknown_and_nothing_hides_it() -> None:
    run = Written()
    run.begin(0.0, "a-1", 1, 1, ("a",))
    run.start(0.0, 1, 1, ("a",))
    run.rank(0.0, 1, "resume", step=0, tier="none")
    run.step(1.0, 1, 1)
    run.rank(5.0, 1, "preflight", stage="group", level="full", seconds=0, counts={})
    report = summarize(run.history(), url="run")
    assert report.seconds[TimeCause.UNKNOWN] == 4.0
    assert report.attributed == pytest.approx(0.2)


def test_a_generation_whose_hosts_vanish_all_at_once_has_failed_until_the_first_of_them_is_back() -> None:
    run = Written()
    for second, name in ((0.0, "a-1"), (0.0, "b-2"), (10.0, "a-3"), (12.0, "b-4")):
        run.launcher(second, name, 0, "launcher_started", launcher=name, host=name[0], processes=1)
    for second, number, names in ((0.0, 1, ("a-1", "b-2")), (13.0, 2, ("a-3", "b-4"))):
        for name in names:
            run.begin(second, name, number, 2, ("a", "b"))
        run.start(second, number, 2, ("a", "b"))
        run.rank(second, number, "resume", step=0, tier="none")
        run.step(second + 1.0, number, 1)
        run.step(second + 2.0, number, 2)
    found = seconds_of(run)
    assert found[TimeCause.FAILURE] == 2 * (10.0 - 2.0)
    assert (found[TimeCause.WAITING], found[TimeCause.ABSENT]) == (3.0 + 1.0, 2.0)
    assert TimeCause.UNKNOWN not in found
    assert sum(found.values()) == 2 * 15.0


def test_a_straggler_and_a_snapshot_take_their_part_of_a_step() -> None:
    run = undisturbed()
    run.rank(20.5, 1, "snapshot", step=4, stall_s=0.125)
    run.lines["events/000001-0a1b2c3d-r00000.jsonl"].sort()
    more = seconds_of(run)
    assert more[TimeCause.SNAPSHOT] == 0.125
    assert more[TimeCause.USEFUL] == seconds_of(undisturbed())[TimeCause.USEFUL] - 0.125


# Any history: hosts that come and go, rows in any order of time, waits longer than their steps.
TIMES = st.floats(0.0, 100.0)
HOSTS = st.sampled_from(["a-1", "b-2", "b-3", "c-4"])


@st.composite
def any_run(draw: st.DrawFn) -> Written:
    run = Written()
    for _ in range(draw(st.integers(0, 25))):
        time, number, host = draw(TIMES), draw(st.integers(1, 4)), draw(HOSTS)
        match draw(st.integers(0, 9)):
            case 0:
                run.launcher(time, host, 0, "launcher_started", launcher=host, host=host[0], processes=draw(st.integers(1, 3)))
            case 1:
                run.begin(time, host, number, draw(st.integers(1, 5)), (host[0],))
            case 2:
                kind = draw(st.sampled_from(["done", "failed", "lost", "grow", "leaving"]))
                run.end(time, host, number, kind, lost=draw(HOSTS) if kind == "lost" else "")
            case 3:
                run.start(time, number, draw(st.integers(1, 5)), (host[0],), rendezvous=draw(TIMES), build=draw(TIMES))
            case 4:
                run.rank(time, number, "resume", step=draw(st.integers(0, 5)), tier="memory")
            case 5 | 6:
                run.step(time, number, draw(st.integers(1, 9)), waits={"data": draw(st.floats(-1, 100))})
            case 7:
                run.rank(time, number, "eval", step=1, loss=None, seconds=draw(TIMES))
            case 8:
                run.rank(time, number, "failure", exit_code=70, error="e", phase="start", step=0, rank=draw(st.integers(0, 3)))
            case 9:
                run.launcher(time, host, number, "launcher_ended", exit_code=0, reason="")
    return run


def elementary(segments: list[Segment]) -> list[list[Segment]]:
    """The segments of each span of time in which nothing changes."""
    times = sorted({time for one in segments for time in (one.begin, one.end)})
    return [[one for one in segments if one.begin <= begin and one.end >= end] for begin, end in pairwise(times)]


@settings(max_examples=examples(20))
@given(any_run())
def test_each_second_of_each_worker_has_exactly_one_cause(run: Written) -> None:
    segments, largest = attribute(run.history()), 0.0
    for present in elementary(segments):
        group = [one.workers for one in present if one.generation]
        waiting = [one.workers for one in present if one.cause is TimeCause.WAITING]
        absent = [one.workers for one in present if one.cause is TimeCause.ABSENT]
        assert max(len(group), len(waiting), len(absent)) <= 1
        assert len(present) == len(group) + len(waiting) + len(absent)
        largest = max(largest, *group, 0.0)
        assert sum(one.workers for one in present) == max(largest, sum(group) + sum(waiting))
    report = summarize(run.history(), url="run")
    assert sum(report.seconds.values()) == pytest.approx(report.worker_s)
    assert report.worker_s == pytest.approx(sum(one.worker_s for one in segments))


def test_which_object_of_the_same_moments_is_read_first_does_not_matter() -> None:
    run = Written()
    run.launcher(0.0, "a-1", 0, "launcher_started", launcher="a-1", host="a", processes=1)
    run.begin(0.0, "b-2", 1, 1, ("b",))
    for time in (0.0, 1.0):
        run.begin(time, "a-1", 1, 1, ("a",))
    other = History()
    for key, lines in sorted(run.lines.items(), reverse=True):
        other.add(key, b"".join(lines))
    assert attribute(other) == attribute(run.history())


GARBLED = (b"\xff{]\n", b'{"time": NaN}\n', b"[]\n")


@settings(max_examples=examples(20))
@given(any_run(), st.randoms())
def test_in_pieces_and_with_torn_lines_it_is_the_same(run: Written, chance: random.Random) -> None:
    pieces = [(key, index) for key, lines in run.lines.items() for index in range(len(lines))]
    chance.shuffle(pieces)
    # Objects grow on their own; the lines of each come in their order.
    keys, taken, history = [key for key, _ in pieces], dict.fromkeys(run.lines, 0), History()
    for key in keys:
        line = run.lines[key][taken[key]]
        taken[key] += 1
        history.add(key, line + chance.choice([b"", line, line[: len(line) // 2] + b"\n", *GARBLED]))
    assert attribute(history) == attribute(run.history())


def test_a_reader_takes_what_is_new_and_leaves_a_line_that_is_being_written(tmp_path: Path) -> None:
    run = killed()
    whole = {key: b"".join(lines) for key, lines in run.lines.items()}
    reader = EventReader(open_store(str(tmp_path)))
    (tmp_path / "events").mkdir()
    for share in (0.3, 0.31, 0.7, 1.0):
        for key, data in whole.items():
            (tmp_path / key).write_bytes(data[: int(share * len(data))])
        history = reader.update()
    assert attribute(history) == attribute(run.history())
    assert history.garbled == 0


def test_a_merged_object_with_several_launchers_counts_like_their_journals(tmp_path: Path) -> None:
    run = lost_host()
    launchers = sorted(key for key in run.lines if "launcher-" in key)
    merged = [line for key in launchers for line in run.lines.pop(key)]
    run.lines["events/000001-to-000064.part-00001-launchers.jsonl"] = merged
    assert attribute(run.save(tmp_path).update()) == attribute(lost_host().history())
