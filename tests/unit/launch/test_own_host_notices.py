import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from elastictrain.config.composed import RunConfig
from elastictrain.config.load import load
from elastictrain.fault.notices import MetadataError, Notice, NoticePoller
from elastictrain.fault.stop import StopListener
from elastictrain.launch.cluster.place import ClusterPlace
from elastictrain.launch.own_host import CloudSource, watch_notices
from elastictrain.launch.records import Recorder
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.opening import open_store

LIMIT_S = 10.0
PLACE = ClusterPlace("plain")


@dataclass
class Listener:
    """Takes down what it is asked."""

    asked: "queue.SimpleQueue[tuple[str, float | None]]" = field(default_factory=queue.SimpleQueue)

    def ask(self, reason: str, *, deadline: float | None = None) -> None:
        self.asked.put((reason, deadline))


@dataclass
class FakeCloud:
    """A metadata service that has one thing to say."""

    notice: Notice | Exception | None = None
    name: str = "a cloud"
    looks: int = 0

    def look(self) -> Notice | None:
        self.looks += 1
        if isinstance(self.notice, Exception):
            raise self.notice
        return self.notice


@dataclass
class Watched:
    """What comes of notices."""

    folder: Path
    listener: Listener = field(default_factory=Listener)
    said: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "events/l.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(["recipe=llama_tiny"], with_task=False)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    fake = FakeCloud()
    monkeypatch.setattr("elastictrain.launch.own_host.detect", lambda: fake)
    return fake


@contextmanager
def watching(config: RunConfig, watched: Watched, place: ClusterPlace = PLACE) -> Iterator[NoticePoller]:
    log = open_append_log(open_store(str(watched.folder)), "events/l.jsonl", flush_s=1.0)
    listener = cast(StopListener, watched.listener)
    poller = watch_notices(config, place, listener=listener, recorder=Recorder(log), print_line=watched.said.put)
    try:
        yield poller
    finally:
        poller.close()
        for thread in [thread for thread in threading.enumerate() if thread.name == "notices"]:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        log.close()


def first(config: RunConfig, watched: Watched, place: ClusterPlace = PLACE) -> tuple[str, float | None]:
    """What the listener is asked for."""
    with watching(config, watched, place):
        return watched.listener.asked.get(timeout=LIMIT_S)


def unlimited(config: RunConfig, *, max_hours: float = 0.0, notices: bool = False) -> RunConfig:
    return replace(config, launch=replace(config.launch, max_hours=max_hours, notices=notices))


def test_our_own_limit(config: RunConfig, watched: Watched) -> None:
    now = time.time()
    reason, deadline = first(unlimited(config, max_hours=0.001), watched)
    assert "launch.max_hours" in reason
    assert deadline is not None
    assert now + 3.6 <= deadline < now + 3.6 + LIMIT_S
    assert [(one["event"], one["leave"], one["deadline"], one["incarnation"]) for one in watched.events()] == [
        ("notice", True, deadline, "generation-0")
    ]
    assert watched.said.empty()


def test_the_limit_of_the_scheduler(config: RunConfig, watched: Watched) -> None:
    end = time.time() + 10.0
    reason, deadline = first(unlimited(config, max_hours=1.0), watched, replace(PLACE, deadline=end))
    assert deadline == end
    assert "job" in reason


def test_a_limit_that_is_far_away_is_no_notice(config: RunConfig, watched: Watched) -> None:
    far = time.time() + 10 * config.fault.notice_s
    with watching(unlimited(config, max_hours=10.0), watched, replace(PLACE, deadline=far)):
        pass
    assert watched.listener.asked.empty()


def test_the_cloud_takes_the_host(config: RunConfig, watched: Watched, cloud: FakeCloud) -> None:
    cloud.notice = Notice("preempt", "AWS preempts", 1900000000.0)
    assert first(unlimited(config, notices=True), watched) == ("AWS preempts", 1900000000.0)


def test_a_hint_is_only_told(config: RunConfig, watched: Watched, cloud: FakeCloud) -> None:
    cloud.notice = Notice("rebalance", "AWS rebalances", None, leave=False)
    with watching(unlimited(config, notices=True), watched):
        assert "(AWS rebalances)" in watched.said.get(timeout=LIMIT_S)
    assert watched.listener.asked.empty()
    assert [(one["reason"], one["leave"], one["deadline"]) for one in watched.events()] == [("AWS rebalances", False, None)]


def test_who_does_not_want_to_ask_a_cloud_does_not(config: RunConfig, watched: Watched, cloud: FakeCloud) -> None:
    cloud.notice = Notice("preempt", "AWS preempts", None)
    with watching(unlimited(config), watched):
        pass
    assert cloud.looks == 0


def test_which_cloud_it_is_is_found_out_once(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def detect() -> FakeCloud:
        looks.append(1)
        return cloud

    monkeypatch.setattr("elastictrain.launch.own_host.detect", detect)
    source = CloudSource()
    assert looks == []
    assert source.look() is source.look() is None
    cloud.notice = Notice("preempt", "taken", None)
    assert source.look() is cloud.notice
    cloud.notice = MetadataError("away")
    with pytest.raises(MetadataError, match="away"):
        source.look()
    assert (len(looks), cloud.looks) == (1, 4)


def test_outside_of_clouds_nobody_is_asked(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.launch.own_host.detect", lambda: None)
    source = CloudSource()
    assert source.look() is source.look() is None
    assert cloud.looks == 0


def test_a_question_that_failed_before_the_cloud_was_known_is_asked_again(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[FakeCloud | Exception] = [OSError("no memory"), cloud]

    def detect() -> FakeCloud:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("elastictrain.launch.own_host.detect", detect)
    source = CloudSource()
    with pytest.raises(OSError, match="no memory"):
        source.look()
    source.look()
    assert cloud.looks == 1
