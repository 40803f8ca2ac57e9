import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from elastictrain.checkpoint.saver.connections import WorkerConnection, WorkerConnections
from elastictrain.checkpoint.saver.messages import SaverWelcome, ToSaver, WorkerHello, encode
from elastictrain.checkpoint.saver.process import connect_saver


class SaverService:
    """Takes a connection for a worker once it has said hello."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.now_s = 100.0
        self.workers = WorkerConnections(self.folder, on_message=self._hear, on_gone=lambda one: None, clock=lambda: self.now_s)

    def _hear(self, one: WorkerConnection, message: ToSaver) -> None:
        assert isinstance(message, WorkerHello)
        one.rank = message.rank
        self.workers.send(one, SaverWelcome(1, 0))

    def turn(self, seconds: float = 0.05) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.workers.turn(0.01)

    def connect_saver(self) -> socket.socket:
        connection = connect_saver(self.folder)
        self.workers.turn(0.01)
        return connection

    def welcomes(self, connection: socket.socket) -> bool:
        connection.settimeout(2.0)
        connection.sendall(encode(WorkerHello(3, (3,), 4, "000001-aa", 0, "")))
        self.turn()
        return bool(connection.recv(4096))


@contextmanager
def keeping(folder: Path) -> Iterator[SaverService]:
    found = SaverService(folder)
    try:
        yield found
    finally:
        found.workers.stop_listening()
        found.workers.close()


def hung_up(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return not connection.recv(4096)
    except TimeoutError:
        return False


def test_silent_connections_keep_no_worker_out(tmp_path: Path) -> None:
    with keeping(tmp_path) as saver, ExitStack() as stack:
        silent = [stack.enter_context(saver.connect_saver()) for _ in range(300)]
        assert saver.welcomes(stack.enter_context(saver.connect_saver()))
        assert hung_up(silent[0])
        assert not hung_up(silent[-1])
        assert len(saver.workers.connections) == 1


def test_who_says_nothing_in_time_is_hung_up_on_and_a_worker_may_be_silent(tmp_path: Path) -> None:
    with keeping(tmp_path) as saver, saver.connect_saver() as worker:
        assert saver.welcomes(worker)
        with saver.connect_saver() as silent:
            assert not hung_up(silent)
            saver.now_s += 2.5
            saver.workers.turn(0.01)
            assert hung_up(silent)
            assert not hung_up(worker)
