import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.checkpoint.saver.link import News, SaverLink
from elastictrain.checkpoint.saver.messages import Saved, SaveFailure, StepTook, WorkerHello, encode
from elastictrain.checkpoint.saver.process import SaverConfig, SaverStarter
from elastictrain.errors import CheckpointError
from elastictrain.events import Event, KeeperLost, KeeperStarted

FACTS = SaverConfig(
    "unused", "run", keep_last=2, keep_every=0, save_timeout_s=5.0, flush_s=1.0, grace_s=1.0, versions={}, manifest_bytes=0
)
HELLO = WorkerHello(rank=0, ranks=(0,), world_size=1, incarnation="000001-aa", agent=0, address="")
REASON = "too-late"
WELCOME = {"op": "welcome", "pid": 4242, "port": 7}


class FakeSaver:
    """Listens where a saver would; notes what it hears, and says what it is told to."""

    def __init__(self, folder: Path, *, answers: bool = True) -> None:
        self.heard: list[dict[str, object]] = []
        self.connections: list[socket.socket] = []
        self.deaf = False
        self._answers = answers
        self._path = folder / "keeper.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        lines = JsonLines(dict)
        with suppress(OSError):
            while data := connection.recv(65536):
                for message in lines.feed(data):
                    self.heard.append(message)
                    if message["op"] == "hello" and self._answers:
                        connection.sendall(encode(WELCOME))
                if self.deaf:
                    return

    def send(self, message: dict[str, object]) -> None:
        self.connections[-1].sendall(encode(message))

    def hang_up(self) -> None:
        # Those that are there now: who is hung up on comes again at once.
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def end(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self.hang_up()
        self._path.unlink(missing_ok=True)

    def ops(self) -> list[str]:
        return [str(message["op"]) for message in self.heard]


@contextmanager
def linked(
    folder: Path, *, starts: bool = False, facts: SaverConfig = FACTS, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[SaverLink, list[Event]]]:
    events: list[Event] = []
    link = SaverLink(str(folder), facts, HELLO, starts=starts, record=events.append, clock=clock)
    link.start()
    try:
        yield link, events
    finally:
        link.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A path of a socket has at most 107 characters.
    monkeypatch.chdir(tmp_path)
    return Path(os.path.relpath(tmp_path))


@pytest.fixture
def saver(folder: Path) -> Iterator[FakeSaver]:
    fake = FakeSaver(folder)
    yield fake
    fake.end()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def news_of(link: SaverLink, count: int = 1) -> list[News]:
    """What the link has to tell, once it is so much."""
    news: list[News] = []
    until(lambda: news.extend(link.take_news()) or len(news) >= count)
    return news


def test_a_snapshot_is_needed_until_it_was_seen_and_released(folder: Path, saver: FakeSaver) -> None:
    with linked(folder) as (link, _):
        link.wait(5)
        assert (link.pid, link.port) == (4242, 7)
        link.announce(1, 30, durable=True)
        until(lambda: "snapshot" in saver.ops())
        assert saver.heard[-1] == {"op": "snapshot", "slot": 1, "step": 30, "durable": True}
        assert link.needs(1, 30)
        saver.send({"op": "seen", "slot": 1, "step": 29})
        saver.send({"op": "released", "step": 30})
        saver.send({"op": "saved", "step": 30, "checkpoint": "c", "bytes": 5})
        assert news_of(link) == [Saved(30, "c", 5)]
        assert link.needs(1, 30), "another one was seen"
        saver.send({"op": "seen", "slot": 1, "step": 30})
        until(lambda: not link.needs(1, 30))
        assert link.take_news() == []
    until(lambda: "bye" in saver.ops())


def test_who_is_told_no_more_of_a_step_does_not_wait_for_it(folder: Path, saver: FakeSaver) -> None:
    """The ranks of other hosts than the first: only that one commits."""
    now = [100.0]
    with linked(folder, clock=lambda: now[0]) as (link, _):
        link.wait(5)
        link.announce(1, 30, durable=True)
        until(lambda: "snapshot" in saver.ops())
        saver.send({"op": "released", "step": 30, "done": True})
        saver.send({"op": "seen", "slot": 1, "step": 30})
        until(lambda: not link.needs(1, 30))
        now[0] += 1000
        assert link.take_news() == []
        assert not link.broken


def test_a_step_that_was_written_and_not_committed_has_failed_when_its_saver_is_gone(folder: Path, saver: FakeSaver) -> None:
    """Its slot may hold another one by now, so the successor does not find it."""
    with linked(folder) as (link, _):
        link.wait(5)
        for slot, step in enumerate((30, 31)):
            link.announce(slot, step, durable=True)
        until(lambda: saver.ops().count("snapshot") == 2)
        saver.send({"op": "released", "step": 30, "done": False})
        saver.send({"op": "seen", "slot": 0, "step": 30})
        until(lambda: not link.needs(0, 30))
        link.announce(0, 32, durable=False)
        saver.hang_up()
        until(lambda: saver.ops().count("snapshot") == 5)
        assert link.take_news() == [], "the same saver"
        link.pid = 1
        saver.hang_up()
        assert [(type(one), one.step) for one in news_of(link)] == [(SaveFailure, 30)]
        assert link.needs(1, 31)


def test_a_failure_is_told_once(folder: Path, saver: FakeSaver) -> None:
    with linked(folder) as (link, _):
        link.wait(5)
        link.announce(0, 30, durable=True)
        until(lambda: "snapshot" in saver.ops())
        saver.send({"op": "failed", "step": 30, "error": "full"})
        assert news_of(link) == [SaveFailure(30, "full")]
        assert link.take_news() == []


def test_a_successor_is_told_what_its_predecessor_knew(folder: Path, saver: FakeSaver) -> None:
    with linked(folder, starts=True) as (link, events):
        link.wait(5)
        link.announce(0, 30, durable=True)
        until(lambda: "snapshot" in saver.ops())
        saver.heard.clear()
        saver.hang_up()
        until(lambda: saver.ops() == ["hello", "snapshot"])
        assert saver.heard[0]["port"] == 7, "the other hosts know this port"
        assert saver.heard[1] == {"op": "snapshot", "slot": 0, "step": 30, "durable": True}
        assert events == [KeeperStarted(pid=4242), KeeperLost(pid=4242), KeeperStarted(pid=4242)]


def test_a_saver_that_is_about_to_end_is_not_a_lost_one(folder: Path) -> None:
    """It hangs up before it has said a word: nothing is recorded, and the next knock is not at once."""
    quiet = FakeSaver(folder, answers=False)
    with linked(folder, starts=True) as (_, events):
        until(lambda: "hello" in quiet.ops())
        for _ in range(5):
            quiet.hang_up()
            time.sleep(0.03)
        assert len(quiet.connections) <= 12
        assert events == []
    quiet.end()


def test_what_is_to_be_sent_while_there_is_no_saver_has_failed(folder: Path) -> None:
    """Nobody would ever say that it is over, and no other step would be sent."""
    link = SaverLink(str(folder), FACTS, HELLO, starts=True, record=lambda _: None)
    link.send(5)
    assert link.sending() == (False, True)


def test_a_run_that_ends_without_its_saver_leaves_nothing_in_memory(folder: Path) -> None:
    """It was killed a moment before."""
    saver = FakeSaver(folder)
    with linked(folder, starts=True) as (link, _):
        link.wait(5)
        saver.end()
        (folder / "own-r00000-s0").write_bytes(b"x")
        link.pid = 0
        link.finish(1.0)
    assert not folder.exists() or not list(folder.iterdir())


def test_a_refusal_is_final(folder: Path) -> None:
    quiet = FakeSaver(folder, answers=False)
    with linked(folder) as (link, events):
        until(lambda: "hello" in quiet.ops())
        link.announce(0, 30, durable=True)
        quiet.send({"op": "refused", "reason": REASON})
        until(lambda: link.broken)
        assert REASON in link.broken
        assert not link.needs(0, 30)
        assert [one.step for one in link.take_news()] == [30]
        with pytest.raises(CheckpointError, match=REASON):
            link.wait(1)
        time.sleep(0.1)
        assert len(quiet.connections) == 1
        assert events == []
        link.announce(1, 31, durable=True)
        assert not link.needs(1, 31)
        assert [one.step for one in link.take_news()] == [31]
    quiet.end()


@pytest.mark.parametrize(
    "words", [b"nonsense\n", b'{"op": "welcome"}\n', b'{"op": "saved", "step": "x"}\n', b'{"op": "what"}\n']
)
def test_a_saver_that_talks_nonsense_is_none(words: bytes, folder: Path) -> None:
    quiet = FakeSaver(folder, answers=False)
    with linked(folder) as (link, _):
        until(lambda: "hello" in quiet.ops())
        quiet.connections[-1].sendall(words)
        until(lambda: link.broken)
    quiet.end()


def test_a_saver_that_hangs_is_given_up_when_a_save_is_overdue(folder: Path, saver: FakeSaver) -> None:
    now = [100.0]
    with linked(folder, facts=replace(FACTS, save_timeout_s=60.0), clock=lambda: now[0]) as (link, events):
        link.wait(5)
        link.announce(0, 30, durable=True)
        link.announce(1, 31, durable=False)
        now[0] += 59
        assert link.take_news() == []
        assert not link.broken
        now[0] += 2
        assert [one.step for one in link.take_news()] == [30]
        assert "step 30" in link.broken
        assert "60 s" in link.broken
        assert not link.needs(0, 30)
        assert not link.needs(1, 31)
        time.sleep(0.1)
        assert len(saver.connections) == 1
        assert events == []


def test_what_was_saved_or_failed_is_not_overdue(folder: Path, saver: FakeSaver) -> None:
    now = [100.0]
    with linked(folder, clock=lambda: now[0]) as (link, _):
        link.wait(5)
        link.announce(0, 30, durable=True)
        link.announce(1, 31, durable=True)
        until(lambda: saver.ops().count("snapshot") == 2)
        saver.send({"op": "saved", "step": 30, "checkpoint": "c", "bytes": 5})
        saver.send({"op": "failed", "step": 31, "error": "full"})
        assert news_of(link, 2) == [Saved(30, "c", 5), SaveFailure(31, "full")]
        now[0] += 1000
        assert link.take_news() == []
        assert not link.broken


def test_a_saver_that_does_not_read_does_not_stop_training(folder: Path) -> None:
    deaf = FakeSaver(folder)
    deaf.deaf = True
    with linked(folder) as (link, _):
        link.wait(5)
        began = time.monotonic()
        for micros in range(5000):
            link.send_message(StepTook(micros))
        assert time.monotonic() - began < 5
        until(lambda: len(deaf.connections) > 1)
    deaf.end()


def test_a_lost_rank_is_known(folder: Path, saver: FakeSaver) -> None:
    with linked(folder) as (link, _):
        link.wait(5)
        assert link.lost is None
        saver.send({"op": "lost", "rank": 3})
        until(lambda: link.lost)
        assert link.lost is not None
        assert link.lost[0] == 3


def test_a_folder_that_the_saver_before_removes_meanwhile_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savers: list[FakeSaver] = []

    def start(_: SaverStarter) -> None:
        if not tries:
            tries.append(True)
            raise FileNotFoundError(2, "No such file or directory", "run.json")
        savers.append(FakeSaver(folder))

    tries: list[bool] = []
    monkeypatch.setattr(SaverStarter, "start_if_gone", start)
    with linked(folder, starts=True) as (link, _):
        link.wait()
        assert not link.broken
    savers[0].end()


def test_nobody_answers(folder: Path) -> None:
    with linked(folder) as (link, _), pytest.raises(CheckpointError, match=r"0\.1 s"):
        link.wait(0.1)
