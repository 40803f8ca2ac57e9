"""The launcher's connection, to a real saver in this process."""

import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.folder import make_private, run_folder
from elastictrain.checkpoint.saver.messages import Flushed, FlushRequest, RankLost, WorkerRefused, encode
from elastictrain.checkpoint.saver.process import SOCKET_NAME
from elastictrain.config.composed import RunConfig
from elastictrain.config.load import load
from elastictrain.launch.final_save import ask_to_flush
from elastictrain.net.server import PendingLimits
from tests.unit.checkpoint.memory.madeslots import facts_of, put
from tests.unit.checkpoint.saver.running import Worker, checkpoints, keeping, until


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    options = [f"run.dir={tmp_path}/run", f"checkpoint.memory_dir={tmp_path}"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    return load(["recipe=llama_tiny", *options], with_task=False)


@pytest.fixture
def memory(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(run_folder(config.checkpoint.memory_dir, config.run.dir))
    make_private(str(folder))
    # A path of a socket has at most 107 characters.
    monkeypatch.chdir(folder.parent)
    return Path(folder.name)


@pytest.fixture
def listener(memory: Path) -> Iterator[socket.socket]:
    """A saver that says what a test has it say."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(memory / SOCKET_NAME))
        listening.listen()
        yield listening


def test_without_a_saver_there_is_nobody_to_ask(config: RunConfig) -> None:
    assert ask_to_flush(config) is None


def test_what_is_only_in_memory_is_written_while_the_launcher_lives(config: RunConfig, memory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "events").mkdir()
    with keeping(memory, run):
        worker = Worker(memory, agent=os.getpid())
        facts = facts_of(40)
        put(memory, facts)
        worker.send(op="snapshot", slot=0, step=40, durable=False)
        worker.bye()
        assert checkpoints(run) == []
        saver = ask_to_flush(config)
        assert saver is not None
        assert saver.pid == os.getpid()
        until(lambda: not saver.writes())
        assert checkpoints(run) == [40]
        # It keeps host memory as long as it is asked, and its own launcher lives.
        assert (memory / "own-r00000-s0").exists()
        saver.close()
        again = Worker(memory)
        again.send(op="finish")
        again.bye()


def test_what_storage_refuses_is_waited_for(
    config: RunConfig, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastictrain.checkpoint.saver.final_save._RETRY_S", 0.02)
    # Strangers are not listened to for long, and this launcher is none.
    monkeypatch.setattr("elastictrain.checkpoint.saver.connections.PendingLimits", partial(PendingLimits, handshake_s=0.2))
    run = tmp_path / "run"
    (run / "events").mkdir()
    with keeping(memory, run):
        (run / "checkpoints").write_text("in the way")
        worker = Worker(memory, agent=os.getpid())
        put(memory, facts_of(40))
        worker.send(op="snapshot", slot=0, step=40, durable=False)
        worker.bye()
        saver = ask_to_flush(config)
        assert saver is not None
        # It was tried, and tried again.
        until(lambda: caplog.text.count("be saved") > 1)
        assert saver.writes()
        (run / "checkpoints").unlink()
        until(lambda: not saver.writes())
        assert checkpoints(run) == [40]
        saver.close()
        again = Worker(memory)
        again.send(op="finish")
        again.bye()


@pytest.mark.parametrize("answer", [encode(Flushed()), encode(WorkerRefused("?")), b"nonsense\n", b""])
def test_it_is_waited_for_until_it_says_so_or_hangs_up(answer: bytes, listener: socket.socket, config: RunConfig) -> None:
    saver = ask_to_flush(config)
    assert saver is not None
    assert saver.writes()
    with listener.accept()[0] as connection:
        assert connection.recv(100) == encode(FlushRequest())
        assert saver.writes()
        connection.sendall(encode(RankLost(1)))
        assert saver.writes()
        connection.sendall(answer)
    until(lambda: not saver.writes())
    assert not saver.writes()
    saver.close()
