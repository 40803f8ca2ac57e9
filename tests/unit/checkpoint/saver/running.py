"""A real saver in a thread, and workers that talk to it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.checkpoint import writer
from elastictrain.checkpoint.folders import ROOT
from elastictrain.checkpoint.saver.messages import encode
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.checkpoint.saver.service import SaverService
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.storage.opening import open_store
from tests.unit.checkpoint.memory.madeslots import RUN

FACTS = SaverConfig(
    "unused", RUN, keep_last=9, keep_every=0, save_timeout_s=5.0, flush_s=1.0, grace_s=0.5, versions={}, manifest_bytes=0
)
NOBODY = 0
"""An agent that is no process: a saver does not wait for it."""


class Worker:
    """What one rank says to its saver, and hears."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        ranks: tuple[int, ...] = (0,),
        world_size: int | None = None,
        incarnation: str = "000001-aa",
        agent: int = NOBODY,
        settle: bool = True,
        key: str = "",
    ) -> None:
        """`settle`: wait until the saver has looked for what this rank had before. `key` is the proof of a key."""
        self._lines = JsonLines(dict)
        self.waiting: list[dict[str, object]] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(folder / "keeper.sock"))
        self.send(
            op="hello",
            rank=rank,
            ranks=list(ranks),
            world_size=world_size or len(ranks),
            incarnation=incarnation,
            agent=agent,
            address="",
            port=0,
            key=key,
        )
        if settle:
            self.send(op="snapshot", slot=9, step=0, durable=False)
            self.hear("seen")

    def send(self, **message: object) -> None:
        self.socket.sendall(encode(message))  # type: ignore[arg-type]

    def hear(self, op: str) -> dict[str, object]:
        while True:
            for message in self.waiting:
                if message["op"] == op:
                    self.waiting.remove(message)
                    return message
            data = self.socket.recv(65536)
            assert data, f"hung up before {op}"
            self.waiting += list(self._lines.feed(data))

    def bye(self) -> None:
        self.send(op="bye")
        self.socket.close()


@contextmanager
def keeping(
    memory: Path, run: Path, *, facts: SaverConfig = FACTS, signing: SigningKey | None = None
) -> Iterator[SaverService]:
    saver = SaverService(str(memory), facts, open_store(str(run)), signing=signing)
    thread = threading.Thread(target=saver.run, daemon=True)
    thread.start()
    yield saver
    thread.join(20)
    assert not thread.is_alive()


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (run / ROOT).glob("*/manifest.json"))


def events(run: Path, name: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for path in sorted((run / "events").glob("*-k*.jsonl")) for line in path.read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


@dataclass
class HeldUp:
    """Saves that wait before their commit."""

    reached: threading.Event = field(default_factory=threading.Event)
    """One waits."""

    go_on: threading.Event = field(default_factory=threading.Event)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    """Saves wait before their commit until they may go on, or this ends."""
    held = HeldUp()
    check = writer.check_files

    def wait(*arguments: object, **more: object) -> None:
        held.reached.set()
        assert held.go_on.wait(10)
        check(*arguments, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(writer, "check_files", wait)
        yield held
        held.go_on.set()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
