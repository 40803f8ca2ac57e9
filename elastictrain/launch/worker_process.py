"""One worker as its launcher sees it: what the fork server and the worker itself report of it."""

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from elastictrain.bounded_json import as_record
from elastictrain.fault.launcher_channel import (
    Attach,
    Attached,
    Detach,
    Detached,
    FromWorker,
    Introduced,
    Lines,
    Monitored,
    encode_line,
)
from elastictrain.liveness.__main__ import monitor
from elastictrain.liveness.monitor_client import MonitoredHost

# What a worker is built for; everything else about its rank may change from one generation to the next.
_BUILT_FOR = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(slots=True, eq=False)
class WorkerProcess:
    order: int  # the order to the fork server with which it was started, and its place in that order
    index: int
    connection: socket.socket
    environment: Mapping[str, str]  # of its rank; of a standby a likely one
    standby: bool = False  # whether it has had no rank yet
    process: psutil.Process | None = None  # None until the fork server has started it, or if it ended at once
    code: int | None = None  # its exit code; negative for a signal
    killed: bool = False  # whether its launcher has killed it
    waiting: int | None = None  # while it waits for a rank: the exit code with which it left the last generation
    early: bool = False  # whether it got its rank before it has said that it waits for one
    introduced: bool = False  # whether it has gone to meet the other ranks of the present generation
    attached: bool = False  # whether its groups of the present generation are made
    transport: str = ""  # variables for NCCL and gloo that its preflight has set
    _lines: Lines = field(default_factory=lambda: Lines(FromWorker))

    @property
    def lives(self) -> bool:
        return self.code is None and self.process is not None and self.process.is_running()

    @property
    def over(self) -> bool:
        """Whether it takes part in nothing."""
        return self.code is not None or self.waiting is not None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has built is of use for this rank."""
        return all(self.environment.get(name) == environment.get(name) for name in _BUILT_FOR)

    def choose(self, environment: Mapping[str, str]) -> None:
        """It takes part in the next generation with this rank, from `attach` on."""
        self.early = self.waiting is None
        self.environment, self.standby = environment, False
        self.waiting, self.introduced, self.attached = None, False, False

    def attach(self) -> None:
        self._send(Attach(dict(self.environment)))

    def detach(self, reason: str) -> None:
        self._send(Detach(reason))

    def receive(self) -> None:
        """Take note of what it has sent."""
        with suppress(OSError, ValueError):
            while True:
                data = self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
                if not data:
                    # It ends, and the fork server will report how.
                    self.close()
                    return
                for message in self._lines.feed(data):
                    match message:
                        case Introduced():
                            self.introduced, self.early = True, False
                        case Monitored(folder, facts):
                            _start_monitor(folder, facts)
                        case Attached(transport):
                            self.attached, self.transport = True, transport
                        case Detached() if self.early:
                            # It did not know of its rank yet.
                            self.early = False
                        case Detached(exit_code):
                            self.waiting = exit_code

    def close(self) -> None:
        self.connection.close()

    def _send(self, message: Attach | Detach) -> None:
        # A worker that does not read, or has ended, is noticed otherwise.
        with suppress(OSError):
            self.connection.send(encode_line(message), socket.MSG_DONTWAIT)


def _start_monitor(folder: str, facts: str) -> None:
    """Watch the workers of a generation in a thread, which ends with the last of them."""
    # json.loads keeps paths that are not UTF-8; `parse_record` would refuse them.
    arguments = (folder, as_record(json.loads(facts), MonitoredHost))
    threading.Thread(target=monitor, args=arguments, name="rank-monitor", daemon=True).start()
