"""One worker as its launcher sees it: what the fork server and the worker itself report of it."""

import json
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import psutil

from elastictrain.bounded_json import JsonLines, as_record
from elastictrain.fault.launcher_channel import (
    Attach,
    Attached,
    Begun,
    Detached,
    DetachReceived,
    FromWorker,
    Introduced,
    LeaveOutSlow,
    Monitored,
    ToWorker,
    encode_line,
)
from elastictrain.fault.reasons import Reason, SlowRank
from elastictrain.liveness.__main__ import keep, watch
from elastictrain.liveness.monitor_client import MonitoredHost
from elastictrain.liveness.rank_monitor import LAUNCHED_S, RankMonitor

_STOPS_WITHIN_S, _PAUSE_S = 0.5, 0.001
_OUTLIVE_WORKERS = frozenset(("elastictrain.checkpoint.saver", "elastictrain.liveness"))  # they end by themselves

# What a worker is built for; everything else about its rank may change from one generation to the next.
BUILT_FOR = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A process that takes part in the present generation, or waits for a rank in the next one."""

    order: int  # the order to the fork server with which it was started, and its place in that order
    index: int
    connection: socket.socket
    environment: Mapping[str, str]  # of its rank; of a standby a likely one
    standby: bool = False  # whether it has had no rank yet
    bound: tuple[str, ...] = ()  # of a standby: variables of its environment that the rank must have, too
    process: psutil.Process | None = None  # None until the fork server has started it, or if it ended at once
    code: int | None = None  # its exit code; negative for a signal
    killed: bool = False  # whether its launcher has killed it
    waiting: int | None = None  # while it waits for a rank: the exit code with which it left the last generation
    built: bool = False  # whether it then has its part of the model
    transport: str = ""  # variables for NCCL and gloo that its preflight has set
    # All that follow are of the present generation.
    introduced: bool = False  # whether it has gone to meet the other ranks
    attached: bool = False  # whether its groups are made
    monitor: RankMonitor | None = None  # of this host, if this process has asked for it
    begun: int | None = None  # the step whose state was restored, once this process has reported its first step
    detaching: bool = False  # whether it has acknowledged that it is to detach
    slow: SlowRank | None = None  # for which it asks to leave this host out
    reason: Reason | None = None  # that it has left
    _lines: JsonLines[FromWorker] = field(default_factory=lambda: JsonLines(FromWorker, lenient=True))  # type: ignore[arg-type]

    @property
    def lives(self) -> bool:
        return self.code is None and self.process is not None and self.process.is_running()

    @property
    def local_rank(self) -> str:
        return self.environment.get("LOCAL_RANK", "")

    @property
    def over(self) -> bool:
        """Whether it takes part in nothing."""
        return self.code is not None or self.waiting is not None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether it can have this rank, with what it has built."""
        names = self.bound if self.standby else BUILT_FOR
        return all(self.environment.get(name) == environment.get(name) for name in names)

    def choose(self, environment: Mapping[str, str]) -> None:
        """It takes part in the next generation with this rank, from `attach` on."""
        self.environment, self.standby = environment, False
        self.waiting, self.introduced, self.attached, self.detaching = None, False, False, False
        self.monitor = self.begun = self.slow = self.reason = None

    def attach(self) -> None:
        self.send(Attach(dict(self.environment)))

    def receive(self) -> None:
        """Take note of what it has sent."""
        with suppress(OSError):
            while True:
                data = self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
                if not data:
                    # It ends, and the fork server will report how.
                    self.close()
                    return
                for message in self._lines.feed(data):
                    match message:
                        case Reason():
                            self.reason = message
                        case Begun(step):
                            self.begun = step
                        case LeaveOutSlow(slow):
                            self.slow = slow
                        case Introduced():
                            self.introduced = True
                        case Monitored(folder, facts):
                            with suppress(ValueError):
                                self.monitor = _start_monitor(folder, facts)
                        case Attached(transport):
                            self.attached, self.transport = True, transport
                        case DetachReceived():
                            self.detaching = True
                        case Detached(exit_code, built):
                            self.waiting, self.built = exit_code, built

    def close(self) -> None:
        self.connection.close()

    def send(self, message: ToWorker) -> None:
        # A worker that does not read, or has ended, is noticed otherwise.
        with suppress(OSError):
            self.connection.send(encode_line(message), socket.MSG_DONTWAIT)


def assign(workers: Iterable[WorkerProcess], places: Mapping[int, Mapping[str, str]]) -> dict[int, WorkerProcess]:
    """The worker that each place gets, if one fits; the first workers first."""
    left, found = list(workers), {}
    for index, place in places.items():
        if (fitting := next((one for one in left if one.fits(place)), None)) is not None:
            found[index] = fitting
            left.remove(fitting)
    return found


def _start_monitor(folder: str, facts: str) -> RankMonitor:
    """Watch the workers of a generation in a thread, which ends with the last of them. Raises: ValueError."""
    # json.loads keeps paths that are not UTF-8; `parse_record` would refuse them.
    host = as_record(json.loads(facts), MonitoredHost)
    monitor = RankMonitor(folder, host, record=partial(keep, facts=host), survivor_s=LAUNCHED_S)
    threading.Thread(target=watch, args=(monitor,), name="rank-monitor", daemon=True).start()
    return monitor


def children_once_stopped(pid: int) -> list[psutil.Process]:
    """Those of a process that was sent SIGSTOP: a fork that it had begun ends before it stops."""
    try:
        process, until_s = psutil.Process(pid), time.monotonic() + _STOPS_WITHIN_S
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
        children: list[psutil.Process] = process.children()
        return children
    except psutil.Error:
        return []


def with_children(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """`family` and all descendants, in one pass over the host's processes."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    found = {one.pid: one for one in family if one.is_running()}
    to_do = [*found]
    while to_do:
        started = [child for child in children.get(to_do.pop(), ()) if child.pid not in found]
        found |= {child.pid: child for child in started}
        to_do += [child.pid for child in started]
    return [*found.values()]


def outlives(process: psutil.Process) -> bool:
    try:
        return not _OUTLIVE_WORKERS.isdisjoint(process.cmdline())
    except psutil.Error:
        return False
