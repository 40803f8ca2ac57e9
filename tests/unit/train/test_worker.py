"""What a worker tells its launcher of the step that it has reached."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.load import load
from elastictrain.errors import EXIT_BUG, EXIT_STOPPED, EXIT_TRANSPORT
from elastictrain.events import Failure
from elastictrain.fault.reasons import ExitClassification, Reason, read_reasons
from elastictrain.identity import Identity, Launcher
from elastictrain.liveness.progress import Phase
from elastictrain.liveness.watchdog import LostPeer, Overdue
from elastictrain.storage.opening import open_store
from elastictrain.train.loop import Loop
from elastictrain.train.saving import Reached
from elastictrain.train.worker import Worker
from tests.unit.train.parts import context_of


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """The second of two, in step 9."""
    config = load(["recipe=llama_tiny", "run.dir=run"], with_task=False)
    launcher = Launcher(1, 1, restarted=False, folder=str(tmp_path))
    made = Worker(config, Identity(1, 2, 1, 2, "host", launched=True, launcher=launcher), parent=1)
    made._tracker.set_phase(Phase.FORWARD, step=9)
    return made


def told(folder: Path) -> Reason:
    (reason,) = read_reasons(str(folder))
    return reason


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
def test_a_stop_is_told_with_the_step_that_is_safe(reached: Reached, step: int, worker: Worker, tmp_path: Path) -> None:
    loop = SimpleNamespace(state=SimpleNamespace(step=9), reached=reached, close=lambda *, finished: None)
    context = context_of(heartbeats=SimpleNamespace(close=lambda: None))
    worker._end_in_order(context, cast(Loop, loop), code=EXIT_STOPPED, reason="SIGTERM")
    assert (told(tmp_path).exit_code, told(tmp_path).step, told(tmp_path).sentence) == (EXIT_STOPPED, step, "SIGTERM")


def test_a_failure_is_told_with_the_step_that_it_was_in(worker: Worker, tmp_path: Path) -> None:
    worker._report(ExitClassification(EXIT_BUG, "ZeroDivisionError", show_stack=True), stack="", heard={})
    assert (told(tmp_path).phase, told(tmp_path).step) == ("forward", 9)


def test_who_is_stopped_where_nothing_can_be_saved_has_reached_nothing(worker: Worker, tmp_path: Path) -> None:
    # Compiling takes too long: the watchdog ends it, and the launcher would wait for a step that nobody has.
    worker._report(ExitClassification(EXIT_STOPPED, "asked to stop", show_stack=True), stack="", heard={})
    assert (told(tmp_path).exit_code, told(tmp_path).phase, told(tmp_path).step) == (EXIT_STOPPED, "forward", 0)


def test_who_ends_because_another_rank_is_gone_waits_for_no_disk_and_no_device(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for it before they start again."""
    recorded: list[Failure] = []
    journal = SimpleNamespace(record=recorded.append, flush=lambda: None)
    # Without a way to close it, a store, or a board that is asked for more than this.
    heartbeats = SimpleNamespace(last_heard=lambda: {"rank 0 on host": "1 s ago"}, announce_failure=lambda: None)
    generation = SimpleNamespace(name="000001-aa")
    worker._context = context_of(journal=journal, heartbeats=heartbeats, store=None, generation=generation)

    def left(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", left)
    monkeypatch.setattr("elastictrain.train.worker.limit_the_end", lambda limit_s, *, exit_code: None)
    with pytest.raises(SystemExit, match="71"):
        worker._end_overdue(Overdue(EXIT_TRANSPORT, "rank 0 of this host is gone", show_stacks=False))
    assert told(tmp_path).exit_code == EXIT_TRANSPORT
    (failure,) = recorded
    assert failure.error.startswith("rank 0 of this host is gone")
    assert (failure.phase, failure.step, failure.flight_recorder) == ("forward", 9, None)


@pytest.mark.parametrize(("backend", "noticed"), [("nccl", False), ("gloo", True)])
def test_a_lost_peer_is_noticed_by_the_collectives_of_some_backends(
    backend: str, noticed: bool, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._lost_peer() is None
    worker._backend = backend
    worker._link = cast(SaverLink, SimpleNamespace(lost=(0, 5.0)))
    assert worker._lost_peer() == LostPeer("rank 0 of this host", 5.0, noticed=noticed)


def test_what_was_read_of_a_long_silence_is_kept_also_when_another_rank_turns_out_to_be_gone(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Failure] = []
    journal = SimpleNamespace(record=recorded.append, flush=lambda: None)
    heartbeats = SimpleNamespace(last_heard=dict)
    store, generation = open_store(str(tmp_path / "run")), SimpleNamespace(name="000001-aa")
    worker._context = context_of(journal=journal, heartbeats=heartbeats, store=store, generation=generation)
    worker._hangs._traced = (worker._tracker.mark, '{"entries": []}')
    what = ExitClassification(EXIT_TRANSPORT, "rank 0 of this host is gone", show_stack=False)
    worker._report(what, heard={}, brief=True)
    (failure,) = recorded
    assert failure.flight_recorder == "flight/000001-aa-r00001.json"
    assert store.read(failure.flight_recorder) == b'{"entries": []}'
