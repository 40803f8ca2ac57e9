"""What a launcher knows of a worker, by what the worker sends."""

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.bounded_json import JsonLines, MalformedJsonError, encode_record
from elastictrain.fault.launcher_channel import (
    Attach,
    Attached,
    Detach,
    Detached,
    FromWorker,
    Introduced,
    Monitored,
    ToWorker,
    encode_line,
)
from elastictrain.launch import worker_process as module
from elastictrain.launch.worker_process import WorkerProcess
from elastictrain.liveness.monitor_client import MonitoredHost
from elastictrain.liveness.rank_monitor import RankMonitor

RANK = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "ELASTICTRAIN_GENERATION": "1"}


@dataclass
class Pair:
    """A worker as its launcher sees it, and the worker's end."""

    one: WorkerProcess
    theirs: socket.socket

    def say(self, *messages: FromWorker) -> None:
        self.theirs.sendall(b"".join(map(encode_line, messages)))
        self.one.receive()

    def heard(self) -> list[object]:
        lines = JsonLines(Attach | Detach)
        return list(lines.feed(self.theirs.recv(1 << 20, socket.MSG_DONTWAIT)))

    @property
    def state(self) -> tuple[int | None, bool, bool, str]:
        return self.one.waiting, self.one.introduced, self.one.attached, self.one.transport


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pair(WorkerProcess(1, 0, ours, RANK, process=psutil.Process(os.getpid())), theirs)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_what_a_worker_is_built_for_must_not_change(name: str, pair: Pair) -> None:
    assert pair.one.fits(RANK)
    assert not pair.one.fits({**RANK, name: "4"})
    assert not pair.one.fits({key: value for key, value in RANK.items() if key != name})


def test_everything_else_may(pair: Pair) -> None:
    assert pair.one.fits({**RANK, "ELASTICTRAIN_GENERATION": "2", "MASTER_PORT": "1", "GROUP_RANK": "7"})


def test_a_life_of_two_generations(pair: Pair) -> None:
    one = pair.one
    assert (pair.state, one.over, one.lives) == ((None, False, False, ""), False, True)
    pair.say(Introduced())
    assert pair.state == (None, True, False, "")
    pair.say(Attached('{"A": "b"}'))
    assert pair.state == (None, True, True, '{"A": "b"}')
    one.send(Detach("rank 0 is gone"))
    assert pair.heard() == [Detach("rank 0 is gone")]
    assert not one.over, "it was told, and has not answered"
    pair.say(Detached(71))
    assert (one.waiting, one.over, one.lives) == (71, True, True)
    following = {**RANK, "ELASTICTRAIN_GENERATION": "2"}
    one.choose(following)
    assert (pair.state, one.over) == ((None, False, False, '{"A": "b"}'), False), "what its preflight has set stays"
    one.attach()
    assert pair.heard() == [Attach(following)]
    pair.say(Introduced(), Attached(""))
    assert pair.state == (None, True, True, "")


def test_a_worker_that_has_left_the_second_generation_too_is_over(pair: Pair) -> None:
    pair.say(Detached(71))
    pair.one.choose(RANK)
    pair.say(Introduced(), Detached(70))
    assert (pair.one.waiting, pair.one.over) == (70, True)


class TestStandby:
    @pytest.fixture
    def standby(self, pair: Pair) -> Pair:
        pair.one.standby = True
        return pair

    def test_that_is_ready_takes_part_from_its_choice_on(self, standby: Pair) -> None:
        standby.say(Detached(0))
        assert (standby.one.waiting, standby.one.standby) == (0, True)
        standby.one.choose(RANK)
        assert (standby.one.waiting, standby.one.standby, standby.one.over) == (None, False, False)
        standby.say(Introduced(), Detached(71))
        assert standby.one.waiting == 71


@given(st.lists(st.sampled_from([Introduced(), Attached("{}"), Detached(0), Detached(71)]), max_size=12), st.data())
def test_however_the_bytes_arrive_the_messages_are_the_same(
    messages: list[Introduced | Attached | Detached], data: st.DataObject
) -> None:
    text = b"".join(map(encode_line, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    found = []
    for pieces in ([text], [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            one = Pair(WorkerProcess(1, 0, ours, RANK), theirs)
            for piece in filter(None, pieces):
                theirs.sendall(piece)
                one.one.receive()
            found.append(one.state)
    assert found[0] == found[1]


def test_a_worker_that_ends_is_reported_by_its_parent_and_not_by_its_socket(pair: Pair) -> None:
    pair.theirs.sendall(encode_line(Introduced()))
    pair.theirs.close()
    pair.one.receive()
    pair.one.receive()
    assert (pair.one.introduced, pair.one.code, pair.one.over) == (True, None, False)
    assert pair.one.connection.fileno() == -1, "nobody waits for it any more"
    # Nothing that is told to it fails.
    pair.one.attach()
    pair.one.send(Detach("over"))


@pytest.mark.parametrize(
    "garbage", [b"\n", b"{}\n", b"\xff\xfe\n", b'{"type": "attach", "environment": {}}\n', b'{"type": "detached"}\n']
)
def test_garbage_is_no_message_and_no_end(garbage: bytes, pair: Pair) -> None:
    pair.theirs.sendall(garbage)
    pair.one.receive()
    assert pair.state == (None, False, False, "")
    pair.say(Detached(71))
    assert pair.one.waiting == 71


def test_a_worker_that_does_not_read_holds_nobody_up(pair: Pair) -> None:
    pair.one.environment = {"X": "x" * 100_000}
    for _ in range(100):
        pair.one.attach()
        pair.one.send(Detach("over"))
    assert not pair.one.over


def test_who_has_ended_does_not_live(pair: Pair) -> None:
    pair.say(Detached(71))
    pair.one.code = -9
    assert (pair.one.lives, pair.one.over) == (False, True)
    pair.one.code, pair.one.process = None, None
    assert not pair.one.lives, "the fork server has not told of it yet"


FACTS = MonitoredHost("000002-ab", "a", (0, 1), "/run\udcff", 1.0, 2.0)


def test_the_workers_of_a_host_are_watched_from_when_one_of_them_asks_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: SimpleQueue[tuple[str, MonitoredHost, bool, bool]] = SimpleQueue()

    def watch(monitor: RankMonitor) -> None:
        thread = threading.current_thread()
        watched.put((monitor.folder, monitor.facts, thread is threading.main_thread(), thread.daemon))

    monkeypatch.setattr(module, "watch", watch)
    pair.say(Monitored("/dev/shm/marks", encode_record(FACTS).decode()), Introduced())
    assert watched.get(timeout=10) == ("/dev/shm/marks", FACTS, False, True)
    assert pair.one.introduced


@pytest.mark.parametrize("facts", ["", "{", "[]", "{}", '{"generation": 7}'])
def test_a_host_that_is_not_described_is_not_watched(facts: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "watch", pytest.fail)
    pair.say(Monitored("/dev/shm/marks", facts))
    pair.say(Introduced())
    assert pair.one.introduced, "the launcher goes on"


def test_messages_are_told_apart() -> None:
    for message in (Introduced(), Attached("x"), Detached(3)):
        (found,) = JsonLines(FromWorker).feed(encode_line(message))  # type: ignore[arg-type]
        assert found == message
        with pytest.raises(MalformedJsonError):
            list(JsonLines(ToWorker).feed(encode_line(message)))  # type: ignore[arg-type]
