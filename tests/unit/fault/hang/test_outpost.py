import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.config.fault import FaultGroup
from elastictrain.fault.hang.__main__ import sweep
from elastictrain.fault.hang.outpost import HostFacts, Outpost, workers_of
from elastictrain.fault.hang.stacks import STACKS_SIGNAL
from elastictrain.fault.hang.watcher import LiveWorker
from elastictrain.fault.marks import MarksReader
from elastictrain.fault.whereabouts import Mark, Phase

FACTS = HostFacts("000001-abc", "b", (4, 5), "/run", 1.0, 1.0)
OPTIONS = FaultGroup(step_timeout_s=40.0)


@pytest.fixture(autouse=True)
def the_signal_as_before() -> Iterator[None]:
    before = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, before)


def test_it_shows_where_the_worker_is_and_leaves_nothing(tmp_path: Path) -> None:
    parent = tmp_path / "marks"
    with Outpost(FACTS, rank=5, options=OPTIONS, parent=str(parent)) as outpost:
        assert parent.stat().st_mode & 0o777 == 0o700
        outpost.write(Mark(Phase.REDUCE, 7, 0, 1.0, True, usual_s=2.0))
        found = MarksReader(outpost.folder, 5).read()
        assert found is not None
        assert (found.mark.phase, found.bound_s, found.limit_s, found.stopped_s) == (Phase.REDUCE, 20.0, 40.0, 10.0)
        assert workers_of(outpost.folder, FACTS.ranks) == [(5, os.getpid())]
        assert "test_it_shows_where_the_worker_is" in outpost.take_stacks()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    parent = tmp_path / "marks"
    parent.mkdir(mode=0o755)
    parent.chmod(0o755)
    with pytest.raises(PermissionError, match="alone can enter"):
        Outpost(FACTS, rank=5, options=OPTIONS, parent=str(parent))


def test_a_living_worker_is_seen_to_go_on(tmp_path: Path) -> None:
    with Outpost(FACTS, rank=5, options=OPTIONS, parent=str(tmp_path / "marks")) as outpost:
        worker = LiveWorker(outpost.folder, 5)
        first = worker.look(0.0)
        second = worker.look(0.5)
        outpost.beat()
        third = worker.look(0.5)
        outpost.write(Mark(Phase.REDUCE, 7, 0, 1.0, True))
        fourth = worker.look(0.5)
    looks = [first, second, third, fourth]
    assert [(one.unchanged_s, one.still_s) for one in looks if one is not None] == [(0, 0), (0.5, 0.5), (1.0, 0), (0, 0.5)]
    assert all(one is not None and one.gone_s is None and not one.stopped for one in looks)


def test_what_was_left_long_ago_by_the_dead_is_swept(tmp_path: Path) -> None:
    parent = tmp_path / "marks"
    abandoned = parent / "000001-old-r00000"
    with Outpost(FACTS, rank=5, options=OPTIONS, parent=str(parent)) as outpost:
        abandoned.mkdir()
        later_s = time.time() + 2 * 86400
        assert sweep(str(parent), now=time.time()) == []
        assert sweep(str(parent), now=later_s) == [str(abandoned)]
        assert Path(outpost.folder).exists()
