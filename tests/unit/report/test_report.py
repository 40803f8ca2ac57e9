"""Failures, figures, and the command that shows them."""

import json
from pathlib import Path

import pytest

from elastictrain.report.__main__ import main
from elastictrain.report.failures import HANG, LOST, SILENT, FailureRecord, RungFigures
from elastictrain.report.ledger import TimeCause
from elastictrain.report.output import WIDTH, as_json, as_text
from elastictrain.report.summary import summarize
from tests.unit.report.events import COLLECTIVE, Written, killed, lost_host, mismatch, undisturbed


def failures_of(run: Written) -> list[FailureRecord]:
    return list(summarize(run.history(), url="run").failures)


def test_a_killed_rank_is_the_culprit_and_not_who_noticed_it() -> None:
    (one,) = failures_of(killed())
    assert (one.culprit, one.cause, one.exit_code) == ("rank 1 on a", "killed by SIGKILL", 137)
    assert (one.lost_steps, one.recover_s, one.rung) == (1, 4.0, "in_place")
    assert one.time == killed().zero + 13.5
    assert one.evidence[0] == "local rank 1 was ended by SIGKILL"


def test_a_host_that_fell_silent_is_the_culprit() -> None:
    (one,) = failures_of(lost_host())
    assert (one.culprit, one.cause, one.lost_steps, one.recover_s) == ("b", LOST, 0, 3.0)


@pytest.mark.parametrize("code", [b"71", b"75"])
def test_a_launcher_that_vanished_is_the_culprit_of_connections_that_broke_and_workers_that_ended(code: bytes) -> None:
    run = lost_host()
    changes = ((b'"lost", "exit_code": 71', b'"failed", "exit_code": ' + code), (b'"lost": "b-2"', b'"lost": ""'))
    for before, after in (*changes, (b'"died": ["b"]', b'"died": ["a"]')):
        key = "events/launcher-a-1.jsonl"
        run.lines[key] = [line.replace(before, after) for line in run.lines[key]]
    assert [(one.culprit, one.cause) for one in failures_of(run)] == [("b", LOST)]


def test_of_two_hosts_that_name_each_other_the_one_that_was_left_out_is_the_culprit() -> None:
    run = lost_host()
    run.end(11.0, "b-2", 1, "lost", lost="a-1", died=["a"])
    assert failures_of(run)[0].culprit == "b"


def test_whom_most_hosts_name_is_the_culprit_though_it_names_another_one() -> None:
    run = Written()
    for host in ("a-1", "b-2", "c-3"):
        run.begin(0.0, host, 1, 3, ("a", "b", "c"))
    run.end(4.0, "c-3", 1, "lost", lost="b-2", died=["b"])
    run.end(5.0, "a-1", 1, "lost", lost="c-3", died=["c"])
    run.end(5.0, "b-2", 1, "lost", lost="c-3", died=["c"])
    assert failures_of(run)[0].culprit == "c"


def test_the_record_of_the_end_is_no_generation_and_no_failure() -> None:
    """It has a number of its own, under which launchers end; the run may go on later."""
    run = Written()
    run.begin(1.0, "a-1", 1, 1, ("a",))
    run.step(3.0, 1, 1)
    run.end(4.0, "a-1", 1, "done")
    run.launcher(4.5, "a-1", 2, "launcher_ended", exit_code=0, reason="the last step is done")
    assert [one.number for one in summarize(run.history(), url="run").generations] == [1]
    run.begin(10.0, "a-2", 3, 1, ("a",))
    run.step(12.0, 3, 2)
    report = summarize(run.history(), url="run")
    assert [one.number for one in report.generations] == [1, 3]
    assert not report.failures
    assert "2 generation(s)" in as_text(report, price=None)[1]


def test_an_older_journal_names_who_died_in_the_recovery_after_it() -> None:
    run = killed()
    run.lines = {
        key: [line.replace(b', "died": ["rank 1 on a"]', b"") for line in lines if b"launcher_started" not in line]
        for key, lines in run.lines.items()
    }
    assert failures_of(run)[0].culprit == "rank 1 on a"


def test_a_hang_names_who_was_found_guilty() -> None:
    run = killed()
    run.rank(13.25, 1, "hang", guilty=["rank 0 on a"], hosts=["a"], reason="frozen", text="it has been in data for 9 s")
    (one,) = failures_of(run)
    assert (one.culprit, one.cause, one.time) == ("rank 0 on a", HANG, run.zero + 13.25)
    assert one.evidence[0] == "it has been in data for 9 s"


@pytest.mark.parametrize("guilty", [("rank 1 on a",), ()])
def test_the_flight_recorders_are_the_first_evidence_of_a_hang(guilty: tuple[str, ...]) -> None:
    run = mismatch(*guilty)
    (one,) = failures_of(run)
    assert (one.culprit, one.cause) == ("rank 1 on a", HANG)
    assert one.evidence[:2] == (COLLECTIVE["text"], "hang: it waits")
    report = summarize(run.history(), url="run")
    assert json.loads(json.dumps(as_json(report, price=None)))["failures"][0]["collective"] == COLLECTIVE
    lines = as_text(report, price=None)
    assert max(map(len, lines)) <= WIDTH
    assert str(COLLECTIVE["text"]) in " ".join(" ".join(lines).split())


def test_a_collective_on_which_no_minority_differs_accuses_nobody() -> None:
    run = mismatch(others=[])
    run.lines["events/launcher-a-1.jsonl"] = []
    assert failures_of(run)[0].culprit == ""


def test_without_launchers_an_error_of_one_rank_explains_the_broken_connections_of_the_others() -> None:
    run = Written()
    run.start(1.0, 1, 2, ("a",))
    run.rank(1.0, 1, "resume", step=0, tier="none")
    run.step(2.0, 1, 1)
    run.rank(3.0, 1, "failure", exit_code=71, error="connection reset", phase="reduce", step=2)
    run.rank(3.5, 1, "failure", exit_code=70, error="ValueError: bad sample", phase="data", step=2, rank=1)
    (one,) = failures_of(run)
    assert (one.culprit, one.cause, one.recover_s, one.lost_steps, one.rung) == ("rank 1", "error", None, None, "")


def test_a_rank_that_finds_its_host_unfit_is_the_culprit_though_its_launcher_heard_of_the_end_from_another_host_first() -> None:
    run = Written()
    for name in ("a-1", "b-2"):
        run.begin(0.0, name, 1, 4, ("a", "b"))
    for rank, code in ((2, 69), (0, 71), (1, 71), (3, 71)):
        run.rank(3.0, 1, "failure", rank=rank, exit_code=code, error="b: clock", phase="preflight", step=0)
    for name in ("a-1", "b-2"):
        run.end(3.5, name, 1, "failed", exit_code=71, phase="preflight", died=["a"])
        run.begin(6.0, name, 2, 4, ("a", "b"))
    (found,) = summarize(run.history(), url="run").failures
    assert (found.culprit, found.cause, found.exit_code) == ("rank 2 on b", "host unfit", 69)


def test_a_process_that_vanished_is_a_failure_once_another_start_follows() -> None:
    run = undisturbed()
    key = "events/000001-0a1b2c3d-r00000.jsonl"
    run.lines[key] = [line for line in run.lines[key] if b'"stop"' not in line]
    assert failures_of(run) == []
    run.start(40.0, 2, 1, ("a",), process=3.0)
    (one,) = failures_of(run)
    assert (one.culprit, one.cause, one.exit_code) == ("a", SILENT, None)
    # Nobody was there from the last step to the start of the next process.
    assert summarize(run.history(), url="run").seconds[TimeCause.ABSENT] == 14.0


def test_stops_on_request_are_no_failures() -> None:
    run = Written()
    run.begin(0.0, "a-1", 1, 1, ("a",))
    run.rank(0.5, 1, "failure", exit_code=75, error="asked to stop", phase="preflight", step=0)
    run.end(1.0, "a-1", 1, "leaving")
    assert failures_of(run) == []


@pytest.mark.parametrize(("code", "failures"), [(75, 0), (71, 1)])
def test_without_a_launcher_either(code: int, failures: int) -> None:
    """Two ranks under torchrun are asked to stop before the first step; one of them may have met a broken connection first."""
    run = Written()
    run.start(1.0, 1, 2, ("a",), process=1.0)
    run.rank(3.0, 1, "failure", exit_code=75, error="asked to stop", phase="preflight", step=0)
    run.rank(3.0, 1, "failure", rank=1, exit_code=code, error="a collective failed", phase="preflight", step=0)
    run.start(20.0, 2, 2, ("a",), process=1.0)
    run.step(22.0, 2, 1)
    assert len(failures_of(run)) == failures


def test_steps_are_lost_once_where_recoveries_fail_one_after_the_other() -> None:
    run = killed()
    run.end(20.5, "a-1", 2, "failed", died=["rank 0 on a"])
    for number in (3, 4):
        run.begin(20.5 + number, "a-1", number, 2, ("a",))
    run.end(24.0, "a-1", 3, "failed", died=["rank 0 on a"])
    run.start(25.0, 4, 2, ("a",))
    run.rank(25.0, 4, "resume", step=4, tier="memory")
    run.step(26.0, 4, 5)
    assert [one.lost_steps for one in failures_of(run)] == [1, 2, 0]


def test_figures_of_recoveries_by_rung() -> None:
    report = summarize(killed().history(), url="run")
    assert report.rungs == {"in_place": RungFigures(1, 4.0, 4.0)}
    assert report.mtbf_s == pytest.approx(12.0 + 6.0)


def test_the_summary_fits_a_terminal_and_names_each_cause() -> None:
    run = killed()
    run.end(14.1, "a-1", 1, "failed", died=["rank 1 on a-host-whose-name-is-much-longer-than-any-column"])
    report = summarize(run.history(), url="s3://bucket/" + 90 * "x")
    lines = as_text(report, price=2.49)
    assert max(map(len, lines)) <= WIDTH
    assert all(any(line.startswith(f"  {cause} ") for line in lines) for cause in report.seconds)


def test_a_run_without_a_generation_has_no_figures_yet() -> None:
    assert len(as_text(summarize(Written().history(), url="run"), price=None)) == 1


def test_the_parts_of_the_last_first_step_are_shown_the_longest_first() -> None:
    run = undisturbed()
    assert as_json(summarize(killed().history(), url="run"), price=None)["first_step_s"] == {}
    report = summarize(run.history(), url="run")
    assert report.first_step_s == {"process": 4.0, "preflight_group": 8.25, "first_step": 2.75}
    (line,) = (line for line in as_text(report, price=None) if "first step" in line)
    assert line.endswith("15 s: preflight_group 8.25 s, process 4 s")
    run.rank(40.0, 2, "first_step", step=6, seconds={"launcher": 1.0, "compile": 0.0004})
    report = summarize(run.history(), url="run")
    assert as_json(report, price=None)["first_step_s"] == {"launcher": 1.0, "compile": 0.0004}
    (line,) = (line for line in as_text(report, price=None) if "first step" in line)
    assert line.endswith("1 s: launcher 1 s")


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed().save(tmp_path)
    assert main([str(tmp_path), "--json", "--price", "3600/gpu-hour"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["goodput"], found["attributed"]) == (pytest.approx(12 / 41), 1.0)
    assert sum(found["seconds"].values()) == pytest.approx(41.0)
    assert found["failures"][0].keys() >= {"time", "culprit", "cause", "lost_steps", "recover_s"}
    assert found["cost"]["total"] == pytest.approx(41.0)


def test_the_cost_of_hosts_with_prices_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost_host().save(tmp_path / "run")
    # Of a second, for a 1 and for b 3; both, and whoever waits between generations, cost 2 in the mean.
    (tmp_path / "prices").write_text("a,3600\n*,10800\n")
    assert main([str(tmp_path / "run"), "--json", f"--price={tmp_path / 'prices'}"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    waiting = 2 * (3.0 + 1.0 + 2.0) + 3 * 2.0
    assert cost["total"] == pytest.approx(waiting + 2 * 20.0 + 1 * 5.0 + 2 * 10.0)
    assert cost["total"] - cost["wasted"] == pytest.approx(2 * 6.0 + 1 * 3.0 + 2 * 6.0)


@pytest.mark.parametrize("prices", ["a,1\n", "a,-1\n*,1\n", "a,nan\n*,1\n", "a;1\n", ""])
def test_prices_of_hosts_must_be_whole(prices: str, tmp_path: Path) -> None:
    lost_host().save(tmp_path / "run")
    (tmp_path / "prices").write_text(prices)
    assert main([str(tmp_path / "run"), f"--price={tmp_path / 'prices'}"]) == 64


def test_the_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed().save(tmp_path / "one")
    undisturbed().save(tmp_path / "two")
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--json"]) == 0
    assert [one["generations"][0]["outcome"] for one in json.loads(capsys.readouterr().out)] == ["failed", "done"]


@pytest.mark.parametrize("price", ["2.49", "cheap/gpu-hour", "-1/gpu-hour"])
def test_a_price_must_name_its_unit(price: str, tmp_path: Path) -> None:
    assert main([str(tmp_path), f"--price={price}"]) == 64


def test_a_folder_without_events_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 74
    assert str(tmp_path) in capsys.readouterr().err
