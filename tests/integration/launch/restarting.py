"""Three launchers in threads, with a store whose requests take time; their workers are made up."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from elastictrain.config.composed import FaultGroup, LaunchGroup, RunGroup
from elastictrain.events import Event
from elastictrain.fault.launcher_channel import AskToStop
from elastictrain.fault.reasons import SlowRank
from elastictrain.launch.heartbeat import HeartbeatMesh
from elastictrain.launch.host_registry import HostRegistry
from elastictrain.launch.membership.records import Generation, HostRecord
from elastictrain.launch.membership.store import MembershipStore
from elastictrain.launch.records import Recorder
from elastictrain.launch.supervisor import Supervisor
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.launch.workers_of_generation import WorkersEnd
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.launch.membership.made import record
from tests.unit.launch.supervised import config

LIMIT_S = 60.0
OPTIONS = LaunchGroup(min_hosts=3, max_hosts=3, backoff_s=0.0, poll_s=0.5, lost_s=60.0, grow=False, max_failures=100)


class OverError(Exception):
    """The test is over."""


@dataclass
class Workers:
    """They run until one of the group dies, which all of them notice."""

    started: list[float] = field(default_factory=list)
    code: int | None = None
    unforked: str = ""
    codes: dict[int, int] = field(default_factory=dict)
    reused: bool = False
    silent: tuple[int, ...] = ()
    attached: bool = True
    begun: int | None = None
    slow: SlowRank | None = None
    ready: bool = True

    @property
    def run(self) -> "Workers | None":
        """They are those of one generation after the other."""
        return self if self.started else None

    def prepare(self) -> None: ...
    def start(self, environments: Sequence[Mapping[str, str]], *, store_port: int) -> "Workers":
        self.code = None
        self.started.append(time.monotonic())
        return self

    def poll(self) -> WorkersEnd | None:
        return None if self.code is None else WorkersEnd(self.code, {})

    def kill(self) -> None:
        self.code = -9

    def detach(self, reason: str) -> None: ...
    def release(self) -> None: ...
    def ask_to_stop(self, message: AskToStop) -> None: ...
    def close(self) -> None: ...
    def wait_until_gone(self, limit_s: float) -> None: ...


@dataclass
class Sound:
    """Hears everybody at once."""

    all: "list[Sound]"
    number: int = 0
    news: int = 0
    silent: frozenset[str] = frozenset()
    heard: tuple[frozenset[str], float] = (frozenset("abc"), 0.0)
    lines: list[HostRecord] = field(default_factory=list)

    def follow(self, generation: Generation) -> None:
        self.number = generation.number
        self._tell()

    def send_to(self, hosts: Collection[HostRecord]) -> None: ...
    def send_end(self, line: HostRecord) -> None:
        for other in self.all:
            if other is not self:
                other.lines.append(line)
        self._tell()

    def pop_received(self) -> tuple[int, list[HostRecord]]:
        (news, self.news), (lines, self.lines) = (self.news, 0), (self.lines, [])
        return news, lines

    def _tell(self) -> None:
        for other in self.all:
            if other is not self:
                other.news = max(other.news, self.number)

    def close(self) -> None: ...


class Nothing:
    """Keeps no records."""

    def record(self, generation: int, event: Event) -> None: ...


@dataclass
class Slow:
    """The hook of a store whose requests take as long, each."""

    delay_s: float = 0.0

    def __call__(self, operation: str, key: str) -> None:
        time.sleep(self.delay_s)


class Group:
    """They have begun to train when this returns."""

    def __init__(self, folder: Path) -> None:
        self.slow = Slow()
        store = FakeStore(before=self.slow)
        sounds: list[Sound] = []
        self.stop = threading.Event()
        self.workers = {host: Workers() for host in "abc"}
        self.threads: list[threading.Thread] = []
        self.registries: list[HostRegistry] = []
        for host in "abc":
            sounds.append(Sound(sounds))
            line = replace(record(host), order="abc".index(host))
            registry = HostRegistry(MembershipStore(store), line, poll_s=OPTIONS.poll_s, lost_s=OPTIONS.lost_s)
            supervisor = Supervisor(
                config=config(OPTIONS, FaultGroup(), RunGroup("runs/x")),
                registry=registry,
                heartbeat=cast(HeartbeatMesh, sounds[-1]),
                workers=cast(WorkerGroup, self.workers[host]),
                recorder=cast(Recorder, Nothing()),
                folder=folder / host,
                expected_hosts=3,
                stop_request=lambda: None,
                check_host=lambda: "",
                free_after=0,
                committed_step=lambda: 0,
                remembered_step=lambda: 0,
                ask_to_flush=lambda: None,
                print_line=lambda text: None,
                sleep=self._sleep,
            )
            registry.start()
            self.registries.append(registry)
            self.threads.append(threading.Thread(target=self._run, args=(supervisor,), daemon=True))
            self.threads[-1].start()
        self._wait_for(1)

    def _sleep(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise OverError

    def _run(self, supervisor: Supervisor) -> None:
        with suppress(OverError):
            supervisor.run()

    def restart(self, *, delay_s: float) -> float:
        """A worker of the second host dies; seconds until all hosts have started workers again."""
        number = len(self.workers["a"].started)
        self.slow.delay_s = delay_s
        began_s = time.monotonic()
        for host in "bac":
            # The others notice a moment later.
            self.workers[host].code = 1
            time.sleep(0.02)
        self._wait_for(number + 1)
        self.slow.delay_s = 0.0
        return max(one.started[-1] for one in self.workers.values()) - began_s

    def close(self) -> None:
        """End the launchers."""
        self.stop.set()
        for thread in self.threads:
            thread.join(LIMIT_S)
        for registry in self.registries:
            registry.close(limit_s=LIMIT_S)

    def _wait_for(self, starts: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while min(len(one.started) for one in self.workers.values()) < starts:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
