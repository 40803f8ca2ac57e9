import json
import logging
from pathlib import Path

import pytest

from elastictrain.errors import StorageError
from elastictrain.events import AppendLog, Event
from elastictrain.launch.records import (
    GenerationBegun,
    GenerationEnded,
    LauncherEnded,
    LauncherStarted,
    NoticeGiven,
    Recorder,
    WorkersNotForked,
)
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.opening import open_store
from tests.unit.storage.appended import read_appended

BEGUN = GenerationBegun(hosts=("a", "b"), world_size=12, reason="c left", pause_s=2.0)
ENDED = GenerationEnded(kind="lost", exit_code=71, phase="reduce", step=12, reason="b is silent", lost="b-1", died=("b",))
NOTICE = NoticeGiven(reason="AWS takes it", leave=True, deadline=1900000000.0)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        (BEGUN, {"event": "generation", "hosts": ["a", "b"], "world_size": 12, "reason": "c left", "pause_s": 2.0}),
        (
            ENDED,
            {
                "event": "generation_ended",
                "kind": "lost",
                "exit_code": 71,
                "phase": "reduce",
                "step": 12,
                "reason": "b is silent",
                "lost": "b-1",
                "died": ["b"],
            },
        ),
        (
            LauncherStarted(launcher="a-1", host="a", processes=8),
            {"event": "launcher_started", "launcher": "a-1", "host": "a", "processes": 8},
        ),
        (LauncherEnded(exit_code=70, reason="failed"), {"event": "launcher_ended", "exit_code": 70, "reason": "failed"}),
        (NOTICE, {"event": "notice", "reason": "AWS takes it", "leave": True, "deadline": 1900000000.0}),
        (WorkersNotForked(reason="2 threads"), {"event": "workers_not_forked", "reason": "2 threads"}),
    ],
)
def test_a_record_among_those_of_the_run(event: Event, fields: dict[str, object], tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    recorder = Recorder(open_append_log(store, "events/launcher-a-1.jsonl", flush_s=1.0), clock=lambda: 5.0)
    recorder.record(7, event)
    (line,) = read_appended(store, "events")
    assert json.loads(line) == {"time": 5.0, "incarnation": "generation-7", "rank": -1, **fields}
    recorder.close()


class BrokenLog:
    """Storage is what failed."""

    def append(self, data: bytes) -> None:
        raise StorageError("away")

    def flush(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def test_a_launcher_outlives_its_log(caplog: pytest.LogCaptureFixture) -> None:
    log: AppendLog = BrokenLog()
    recorder = Recorder(log)
    with caplog.at_level(logging.ERROR):
        recorder.record(1, BEGUN)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    recorder.close()


class CountingLog(BrokenLog):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def append(self, data: bytes) -> None:
        self.calls.append("append")

    def close(self) -> None:
        self.calls.append("close")


def test_close_makes_all_durable() -> None:
    log = CountingLog()
    recorder = Recorder(log)
    recorder.record(1, BEGUN)
    recorder.close()
    assert log.calls == ["append", "close"]
