"""A worker group whose fork server and workers are made up: no process is started, and each does what it is told to."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.fault.launcher_channel import Attached, Detached, FromWorker, Introduced, ToWorker, encode_line
from elastictrain.launch import fork_server_link, worker_group, worker_process
from elastictrain.launch.fork_server_link import READY
from elastictrain.launch.worker_group import WorkerGroup

FIRST_PID = 10_000_000  # greater than any pid of the kernel
ARGUMENTS = ("x=1",)


@dataclass
class FakeProcess:
    pid: int
    alive: bool = True
    signals: list[int] = field(default_factory=list)

    def is_running(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)
        self.alive = False

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def cmdline(self) -> list[str]:
        return []


@dataclass
class FakeWorker:
    server: "FakeServer"
    order: int
    index: int
    process: FakeProcess
    connection: socket.socket
    environment: Mapping[str, str]
    received: JsonLines[ToWorker] = field(default_factory=lambda: JsonLines(ToWorker))  # type: ignore[arg-type]

    def say(self, *messages: FromWorker) -> None:
        self.connection.sendall(b"".join(map(encode_line, messages)))

    def heard(self) -> list[ToWorker]:
        try:
            return list(self.received.feed(self.connection.recv(1 << 20, socket.MSG_DONTWAIT)))
        except BlockingIOError:
            return []

    def die(self, code: int = -9) -> None:
        """It has ended, and its parent tells of that."""
        self.process.alive = False
        self.connection.close()
        self.server.tell(order=self.order, codes=[(self.index, code)])

    @property
    def was_killed(self) -> bool:
        return signal.SIGKILL in self.process.signals


class FakeServer:
    """Carries out orders when a test has it do so."""

    def __init__(self, world: "World", command: Sequence[str], stdin: int) -> None:
        self.world = world
        self.command = command
        self.pid = next(world.pids)
        self.connection = socket.socket(fileno=socket.dup(stdin))
        self.connection.setblocking(False)
        self.code: int | None = None
        self.orders: list[dict[str, Any]] = []
        if not world.imports:
            self.tell(**READY)

    def tell(self, **message: object) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def start_workers(self, *, told: bool = True) -> list[FakeWorker]:
        """Carry out the next order. Unless it is `told`, the launcher does not know of that yet."""
        data, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 20, 64)
        (line,) = data.splitlines()
        order = json.loads(line)
        self.orders.append(order)
        assert len(descriptors) == len(order["environments"])
        workers = []
        for index, (descriptor, environment) in enumerate(zip(descriptors, order["environments"], strict=True)):
            process = self.world.processes[pid] = FakeProcess(pid := next(self.world.pids))
            connection = socket.socket(fileno=descriptor)
            workers.append(FakeWorker(self, order["order"], index, process, connection, environment))
        self.world.workers += workers
        if told:
            self.tell_started(workers)
        return workers

    def tell_started(self, workers: Sequence[FakeWorker]) -> None:
        self.tell(order=self.orders[-1]["order"], pids=[one.process.pid for one in workers], store_pid=0, unforked="")

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        """Its children end with it."""
        self.code = -9 if self.code is None else self.code
        for one in self.world.workers:
            if one.server is self:
                one.process.alive = False

    def send_signal(self, number: int) -> None: ...
    def wait(self, timeout_s: float) -> int:
        return self.code or 0

    def close(self) -> None:
        self.connection.close()


class World:
    """A worker group, and everything that it starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.imports = False  # whether servers have yet to import what workers need
        self.pids = count(FIRST_PID)
        self.processes: dict[int, FakeProcess] = {}
        self.workers: list[FakeWorker] = []
        self.servers: list[FakeServer] = []
        self.number = 0
        popen = SimpleNamespace(Popen=self._open, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(fork_server_link, "subprocess", popen)
        processes = SimpleNamespace(Process=self._process, Error=psutil.Error, process_iter=lambda: iter(()))
        for module in (worker_group, worker_process):
            monkeypatch.setattr(module, "psutil", processes)
        self.group = WorkerGroup(ARGUMENTS, clock=lambda: self.now_s)

    @property
    def server(self) -> FakeServer:
        return self.servers[-1]

    def places(self, num_workers: int, *, world_size: int = 0, first: int = 0) -> list[dict[str, str]]:
        self.number += 1
        common = {
            "WORLD_SIZE": str(world_size or num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "ELASTICTRAIN_LAUNCH_FOLDER": f"/tmp/{self.number}",
            "ELASTICTRAIN_GENERATION": str(self.number),
        }
        return [{**common, "RANK": str(first + rank), "LOCAL_RANK": str(rank)} for rank in range(num_workers)]

    def begin(self, num_workers: int, *, store_port: int = 7, **place: int) -> list[FakeWorker]:
        """The next generation; returns the workers that were started for it."""
        self.group.start(self.places(num_workers, **place), store_port=store_port)
        return self.server.start_workers()

    def train(self, workers: Sequence[FakeWorker], *, transport: str = "") -> None:
        """They have met and made their groups."""
        for one in workers:
            one.say(Introduced(), Attached(transport))
        assert self.group.poll() is None

    def fail(self, dead: FakeWorker, survivors: Sequence[FakeWorker]) -> None:
        """A worker dies; the others leave their groups, and the generation is over."""
        dead.die()
        assert self.group.poll() is None
        self.group.detach("a worker is gone")
        for one in survivors:
            one.say(Detached(71, built=True))
        ended = self.group.poll()
        assert ended is not None
        assert list(ended.codes.values()) == [-9]

    def close(self) -> None:
        self.group.close()
        for server in self.servers:
            server.close()
        for one in self.workers:
            one.connection.close()

    def _open(self, command: Sequence[str], *, stdin: int, **_: object) -> FakeServer:
        self.servers.append(FakeServer(self, command, stdin))
        return self.servers[-1]

    def _process(self, pid: int) -> FakeProcess:
        if pid not in self.processes:
            raise psutil.NoSuchProcess(pid)
        return self.processes[pid]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.close()
