"""What a worker tells its launcher, and records, when it ends."""

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.config.load import load
from elastictrain.errors import EXIT_BUG, EXIT_STOPPED, EXIT_TRANSPORT, ConfigError, DetachedError, TransportError
from elastictrain.events import Failure
from elastictrain.fault.launcher_channel import FromWorker
from elastictrain.fault.reasons import ExitClassification, Reason
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity, Launcher
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Overdue
from elastictrain.storage.opening import open_store
from elastictrain.train import hang_watch
from elastictrain.train.context import TrainContext
from elastictrain.train.exit_report import ExitReport
from elastictrain.train.hang_watch import HangWatch
from elastictrain.train.loop import Loop
from elastictrain.train.saving import Reached
from tests.unit.train.parts import context_of

HEARD = {"rank 0 on host": "1 s ago"}


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes that a process would have whose report takes too long."""
    codes: list[int] = []
    monkeypatch.setattr("elastictrain.train.exit_report.limit_the_end", lambda limit_s, *, exit_code: codes.append(exit_code))
    return codes


@pytest.fixture
def report(tmp_path: Path) -> Iterator[ExitReport]:
    """Of the second of two ranks, in step 9."""
    config = load(["recipe=llama_tiny", "run.dir=run"], with_task=False)
    channel = os.open(tmp_path / "channel", os.O_WRONLY | os.O_CREAT)
    launcher = Launcher(1, 1, restarted=False, folder=str(tmp_path), channel=channel)
    identity, tracker = Identity(1, 2, 1, 2, "host", launched=True, launcher=launcher), ProgressTracker()
    tracker.set_phase(Phase.FORWARD, step=9)
    yield ExitReport(config, identity, tracker, HangWatch(config, identity, tracker), lambda: None)
    os.close(channel)


def told(folder: Path) -> Reason:
    lines: JsonLines[FromWorker] = JsonLines(FromWorker)  # type: ignore[arg-type]
    *_, reason = lines.feed((folder / "channel").read_bytes())
    assert isinstance(reason, Reason)
    return reason


def recording(recorded: list[Failure], *, store: object = None, calls: list[str] | None = None) -> TrainContext:
    # Without a store, or a board that is asked for more than this; closed only by who goes on.
    journal = SimpleNamespace(record=recorded.append, flush=lambda: None)
    heartbeats = SimpleNamespace(last_heard=lambda: HEARD, announce_failure=lambda: None)
    if calls is not None:
        journal.close, heartbeats.close = partial(calls.append, "journal"), partial(calls.append, "heartbeats")
    return context_of(journal=journal, heartbeats=heartbeats, store=store, generation=SimpleNamespace(name="000001-aa"))


@pytest.mark.parametrize(
    ("reached", "step"),
    [
        (Reached(9, "storage"), 9),
        (Reached(9, "memory"), 9),
        (Reached(6, "memory"), 6),
        (Reached(6, "peer"), 6),
        (Reached(0, "nothing"), 0),
        (Reached(9, "nothing"), 0),
    ],
    ids=str,
)
def test_a_stop_is_told_with_the_step_that_is_safe(reached: Reached, step: int, report: ExitReport, tmp_path: Path) -> None:
    loop = SimpleNamespace(state=SimpleNamespace(step=9), reached=reached, close=lambda *, finished: None)
    context = context_of(heartbeats=SimpleNamespace(close=lambda: None))
    report.in_order(context, cast(Loop, loop), code=EXIT_STOPPED, reason="SIGTERM")
    assert (told(tmp_path).exit_code, told(tmp_path).step, told(tmp_path).sentence) == (EXIT_STOPPED, step, "SIGTERM")


def test_a_failure_is_told_with_the_step_that_it_was_in(report: ExitReport, tmp_path: Path) -> None:
    assert report.failed(ZeroDivisionError()) == EXIT_BUG
    assert (told(tmp_path).exit_code, told(tmp_path).phase, told(tmp_path).step) == (EXIT_BUG, "forward", 9)


@pytest.mark.parametrize(("finished", "phase"), [(0, Phase.FORWARD), (0, Phase.SAVE), (8, Phase.FORWARD)])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("error", "code"), [(TransportError("gone"), EXIT_TRANSPORT), (ZeroDivisionError(), EXIT_BUG)])
def test_a_collective_that_breaks_before_the_first_step_is_no_failure_where_a_stop_is_asked_for(
    error: Exception,
    code: int,
    asked: bool,
    finished: int,
    phase: Phase,
    report: ExitReport,
    limited: list[int],
    tmp_path: Path,
) -> None:
    """Another rank was asked, too, and has left."""
    report.context = recording(recorded := [], store=open_store(str(tmp_path / "run")), calls=[])
    if asked:
        report.stop_request = lambda: StopRequest("SIGTERM", 0.0)
    report.tracker.set_phase(phase, step=9)
    if finished:
        report.tracker.step_finished(finished)
    if asked and not finished and phase is not Phase.SAVE and code == EXIT_TRANSPORT:
        code = EXIT_STOPPED
    assert report.failed(error) == code
    assert limited == [code]
    assert told(tmp_path).exit_code == recorded[0].exit_code == code
    assert (told(tmp_path).step, "(SIGTERM)" in recorded[0].error) == ((0, True) if code == EXIT_STOPPED else (9, False))


def test_what_all_ranks_find_is_not_reported_where_it_is_expected_of_the_first(
    report: ExitReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elected: list[int] = []
    monkeypatch.setattr("elastictrain.train.exit_report.elect_reporter", lambda rank, **_: elected.append(rank))
    report.failed(ConfigError("wrong"))
    assert (elected, capsys.readouterr().err) == ([1], "")


def test_who_is_stopped_where_nothing_can_be_saved_has_reached_nothing(report: ExitReport, tmp_path: Path) -> None:
    # Compiling takes too long: the watchdog ends it, and the launcher would wait for a step that nobody has.
    report.write(ExitClassification(EXIT_STOPPED, "asked to stop", show_stack=True), stack="", heard={})
    assert (told(tmp_path).exit_code, told(tmp_path).phase, told(tmp_path).step) == (EXIT_STOPPED, "forward", 0)


@pytest.mark.parametrize("cause", ["peer", "lease"])
def test_who_ends_because_of_another_waits_for_no_disk_and_no_device(
    cause: str, report: ExitReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for it before they start again."""
    recorded: list[Failure] = []
    report.context = recording(recorded)

    def left(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", left)
    lost_peer = Overdue(EXIT_TRANSPORT, "rank 0 is gone", show_stacks=False)
    end = partial(report.overdue, lost_peer) if cause == "peer" else partial(report.lease_lost, "another run trains here")
    with pytest.raises(SystemExit) as ended:
        end()
    (failure,) = recorded
    code = EXIT_TRANSPORT if cause == "peer" else EXIT_STOPPED
    assert told(tmp_path).exit_code == ended.value.code == failure.exit_code == code
    assert (failure.phase, failure.step, failure.flight_recorder) == ("forward", 9, None)
    assert failure.last_heard == (HEARD if cause == "peer" else {})


def test_what_was_read_of_a_long_silence_is_kept_also_when_another_rank_turns_out_to_be_gone(
    report: ExitReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Failure] = []
    store = open_store(str(tmp_path / "run"))
    report.context = recording(recorded, store=store)
    monkeypatch.setattr(hang_watch, "flight_recorder", lambda: '{"entries": []}')
    report.hangs.entered()
    report.write(ExitClassification(EXIT_TRANSPORT, "rank 0 is gone", show_stack=False), heard={}, brief=True)
    (failure,) = recorded
    assert failure.flight_recorder == "flight/000001-aa-r00001.json"
    assert store.read(failure.flight_recorder) == b'{"entries": []}'


class TestAProcessThatGoesOn:
    """Its generation has failed: the launcher is told, and nothing is waited for."""

    def leave(self, report: ExitReport, error: Exception, context: TrainContext) -> int:
        failure = report.detached(error)
        report.close_generation(context, failure)
        for thread in threading.enumerate():
            if thread.name == "close-generation":
                thread.join(10)
        return failure.exit_code

    @pytest.mark.parametrize(
        "error", [DetachedError("rank 0 is gone"), TransportError("reset"), ZeroDivisionError("of garbage")]
    )
    def test_ends_with_the_code_of_a_broken_group_whatever_it_was_doing(
        self, error: Exception, report: ExitReport, tmp_path: Path
    ) -> None:
        """What collectives of an aborted group return may break anything."""
        recorded, calls = list[Failure](), list[str]()
        report.context = context = recording(recorded, calls=calls)
        report.loop = cast(Loop, SimpleNamespace(abandon=lambda: calls.append("loop")))
        assert self.leave(report, error, context) == EXIT_TRANSPORT
        reason, (failure,) = told(tmp_path), recorded
        assert (reason.rank, reason.exit_code, reason.phase, reason.step) == (1, EXIT_TRANSPORT, "forward", 9)
        assert (failure.exit_code, failure.phase, failure.step) == (EXIT_TRANSPORT, "forward", 9)
        assert calls == ["heartbeats", "journal", "loop"]

    def test_a_generation_that_was_not_complete_is_left_too(self, report: ExitReport, tmp_path: Path) -> None:
        """It has ended while the ranks were meeting."""
        context = cast(TrainContext, SimpleNamespace())
        assert self.leave(report, DetachedError("rank 0 is gone"), context) == EXIT_TRANSPORT
        assert told(tmp_path).exit_code == EXIT_TRANSPORT

    def test_does_not_wait_for_storage(self, report: ExitReport) -> None:
        go_on = threading.Event()
        journal = SimpleNamespace(record=lambda _: go_on.wait(10), close=lambda: None)
        context = context_of(journal=journal, heartbeats=SimpleNamespace(close=lambda: None))
        began = time.monotonic()
        report.close_generation(context, report.detached(DetachedError("rank 0 is gone")))
        assert time.monotonic() - began < 5
        go_on.set()


@pytest.mark.parametrize(("phase", "exit_code"), [(Phase.STEP, EXIT_BUG), (Phase.FORWARD, EXIT_TRANSPORT)])
def test_a_users_loop_has_connections_of_its_own(phase: Phase, exit_code: int, report: ExitReport) -> None:
    report.tracker.set_phase(phase, step=9)
    assert report.classify(RuntimeError("feature server: connection refused")).exit_code == exit_code
