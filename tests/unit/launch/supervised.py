"""A supervisor of host `a` with everything around it made up: time passes only while it sleeps."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal, cast

from elastictrain.config.composed import (
    CheckpointGroup,
    DataGroup,
    FaultGroup,
    LaunchGroup,
    ParallelGroup,
    RunConfig,
    RunGroup,
    TaskGroup,
    TelemetryGroup,
    TrainGroup,
)
from elastictrain.config.optim import OptimGroup
from elastictrain.config.preflight import PreflightGroup
from elastictrain.errors import EXIT_STOPPED
from elastictrain.events import Event
from elastictrain.fault.launcher_channel import AskToStop
from elastictrain.fault.reasons import JOB_NAME, Reason, SlowRank, leave_text
from elastictrain.fault.stop import StopRequest
from elastictrain.launch.heartbeat import HeartbeatMesh
from elastictrain.launch.host_registry import HostRegistry
from elastictrain.launch.membership.observation import ClusterState, HostObservation
from elastictrain.launch.membership.records import End, Generation, HostRecord, HostState
from elastictrain.launch.records import Recorder
from elastictrain.launch.supervisor import Supervisor
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.launch.workers_of_generation import WorkersEnd
from tests.unit.launch.membership.made import by_host, record

BEGAN_S = 1_000.0
KILLED = -9


class TimeIsUpError(Exception):
    """Ends a run that is to be looked at; it goes on where it was."""


class Diary:
    """What was done to the parts, in order, and when: in seconds since the launcher began."""

    def __init__(self) -> None:
        self.now_s = BEGAN_S
        self.until_s = BEGAN_S
        self.lines: list[tuple[float, str]] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s = round(self.now_s + seconds, 3)
        if self.now_s >= self.until_s:
            raise TimeIsUpError

    @property
    def elapsed_s(self) -> float:
        return round(self.now_s - BEGAN_S, 3)

    def note(self, what: str) -> None:
        self.lines.append((self.elapsed_s, what))

    def when(self, what: str) -> list[float]:
        return [elapsed_s for elapsed_s, line in self.lines if line == what]

    def order(self, *whats: str) -> list[str]:
        """Those of these things that were done, in the order in which they were."""
        return [line for _, line in self.lines if line in whats]


@dataclass
class FakeRegistry:
    """Knows what it is told, and keeps what it is to write."""

    diary: Diary
    known: ClusterState
    record: HostRecord = field(default_factory=lambda: record("a"))
    attentive: bool = True
    hears: tuple[str, ...] = ()
    posts: list[Generation | End] = field(default_factory=list)

    def update(self, state: HostState, *, reason: str = "", **changes: Any) -> None:
        self.diary.note(f"say {state}")
        self.record = replace(self.record, state=state, reason=reason, **changes)

    def post(self, record: Generation | End) -> None:
        self.diary.note(f"post {record.kind}" if isinstance(record, End) else f"post generation {record.number}")
        self.posts.append(record)
        if isinstance(record, End):
            self.record = replace(self.record, end=record)

    def receive(self, lines: Iterable[HostRecord]) -> None:
        self.diary.note(f"hear {' '.join(line.host for line in lines)}")

    def wake(self, generation: int = 0) -> None:
        self.diary.note(f"wake-registry {generation}")

    def close(self, *, limit_s: float) -> None:
        self.diary.note("close registry")


@dataclass
class FakeHeartbeat:
    """Hears what it is told."""

    diary: Diary
    silent: frozenset[str] = frozenset()
    heard: tuple[frozenset[str], float] = (frozenset(ascii_lowercase), 0.0)
    called: tuple[str, ...] = ()
    news: int = 0
    lines: tuple[HostRecord, ...] = ()
    told: list[HostRecord] = field(default_factory=list)

    def follow(self, generation: Generation) -> None:
        self.diary.note(f"follow {generation.number}")

    def send_to(self, hosts: Collection[HostRecord]) -> None:
        self.called = tuple(one.host for one in hosts)

    def send_end(self, line: HostRecord) -> None:
        self.diary.note("say ended")
        self.told.append(line)

    def pop_received(self) -> tuple[int, list[HostRecord]]:
        news, lines = self.news, self.lines
        self.news, self.lines = 0, ()
        return news, list(lines)

    def close(self) -> None:
        self.diary.note("close heartbeat")


@dataclass
class FakeWorkers:
    """They run until they are killed, or are told how they end."""

    diary: Diary
    orders: list[tuple[Sequence[Mapping[str, str]], int]] = field(default_factory=list)
    ready: bool = True
    running: bool = False
    ended: WorkersEnd | None = None
    unforked: str = ""
    codes: dict[int, int] = field(default_factory=dict)
    reused: bool = False
    silent: list[int] = field(default_factory=list)
    attached: bool = True
    begun: int | None = None
    slow: SlowRank | None = None
    asked: list[AskToStop] = field(default_factory=list)
    standbys: list[tuple[Sequence[Mapping[str, str]], tuple[str, ...]]] = field(default_factory=list)
    """The likely ranks, and what they are bound to."""

    def prepare(self) -> None:
        self.diary.note("prepare")

    def start(self, environments: Sequence[Mapping[str, str]], *, store_port: int) -> "FakeWorkers":
        assert not self.running
        self.diary.note("start")
        self.orders.append((environments, store_port))
        self.running, self.ended, self.codes = True, None, {}
        self.begun = self.slow = None
        self.asked = []
        return self

    @property
    def run(self) -> "FakeWorkers | None":
        """They are those of one generation after the other."""
        return self if self.running else None

    def poll(self) -> WorkersEnd | None:
        assert self.running
        self.running = self.ended is None
        return self.ended

    def detach(self, reason: str) -> None:
        assert self.running
        assert reason
        self.diary.note("detach")

    def kill_unresponsive(self) -> None:
        self.diary.note("kill-unresponsive")

    def release(self) -> None:
        assert not self.running
        self.diary.note("release")

    def keep_standbys(self, environments: Sequence[Mapping[str, str]], *, bound: tuple[str, ...]) -> None:
        self.standbys.append((environments, bound))

    def ask_to_stop(self, message: AskToStop) -> None:
        self.diary.note("ask")
        self.asked.append(message)

    def kill(self) -> None:
        self.diary.note("kill")
        self.ended = WorkersEnd(KILLED, {}, begun=self.begun)

    def close(self) -> None:
        self.diary.note("close-workers")
        self.running = False

    def wait_until_gone(self, limit_s: float) -> None:
        assert not self.running
        self.diary.note(f"wait-{limit_s:g}")


@dataclass
class FakeSaverProcess:
    """Writes until a moment that a test sets."""

    diary: Diary
    until_s: float = float("inf")
    pid: int = 4242

    def writes(self) -> bool:
        return self.diary.elapsed_s < self.until_s

    def close(self) -> None:
        self.diary.note("close saver")


@dataclass
class FakeRecorder:
    """Keeps events."""

    events: list[tuple[int, Event]] = field(default_factory=list)

    def record(self, generation: int, event: Event) -> None:
        self.events.append((generation, event))


class SupervisedHost:
    """Host `a`, with a stop request, a state of health and a storage that a test sets."""

    def __init__(
        self,
        folder: Path,
        launch: LaunchGroup | None = None,
        *,
        fault: FaultGroup | None = None,
        on_held: Literal["stop", "wait"] = "stop",
        uses_gpus: bool = False,
    ) -> None:
        self.uses_gpus = uses_gpus
        self.diary = diary = Diary()
        self.registry = FakeRegistry(diary, ClusterState(me=record("a"), began_s=BEGAN_S, read_s=BEGAN_S, reads=1))
        self.heartbeat = FakeHeartbeat(diary)
        self.workers = FakeWorkers(diary)
        self.recorder = FakeRecorder()
        self.folder = folder
        self.said: list[tuple[float, str]] = []
        self.stop_request: StopRequest | None = None
        self.unfit = ""
        self.committed_steps: dict[float, int] = {0.0: 0}
        """By the second from which storage holds them."""

        self.storage_answers = True
        self.storage_asked = 0
        self.saver: FakeSaverProcess | None = FakeSaverProcess(diary)
        self.remembered_step = 0
        options = config(launch or LaunchGroup(), fault or FaultGroup(), RunGroup("runs/x", on_held=on_held))
        self._supervisor = self._supervise(options)

    def go(self, seconds: float) -> int | None:
        """Let time pass; returns the exit code, or None if the launcher is still there."""
        self.diary.until_s = round(self.diary.now_s + seconds, 3)
        try:
            return self._supervisor.run()
        except TimeIsUpError:
            return None

    def learn(
        self,
        newest: Generation | None = None,
        *,
        ends: Iterable[End] = (),
        observed: Mapping[str, HostObservation] | None = None,
    ) -> None:
        """Storage was read: this is new in it."""
        known, now_s = self.registry.known, self.diary.now_s
        if newest is not None:
            known = replace(known, newest=newest, newest_since_s=now_s, ends={}, ended_since_s=None)
        if told := by_host(ends):
            since_s = now_s if known.ended_since_s is None else known.ended_since_s
            known = replace(known, ends={**known.ends, **told}, ended_since_s=since_s)
        if observed is not None:
            known = replace(known, observed=observed)
        self.registry.known = replace(known, read_s=now_s, reads=known.reads + 1)

    def run_workers(self, generation: Generation) -> None:
        """Take part in a generation, up to its workers."""
        self.learn(generation)
        assert self.go(0.2) is None
        assert self.workers.running

    def begin_training(self, *, resumed_step: int = 0) -> None:
        """The first step is through."""
        self.workers.begun = resumed_step

    def note_committed(self, step: int) -> None:
        """The workers know that this step is in storage."""
        leave_text(self.folder / JOB_NAME, json.dumps({"incarnations": [], "step": step}))

    def end_workers(self, code: int, *reasons: Reason, codes: Mapping[int, int] | None = None) -> None:
        """They end by themselves."""
        done = max((one.step - 1 for one in reasons if one.exit_code != EXIT_STOPPED), default=0)
        self.workers.ended = WorkersEnd(code, codes or {}, done, begun=self.workers.begun, reasons=reasons)

    def ask(self, *, notice_s: float | None, reason: str = "SIGTERM") -> None:
        """A person, a scheduler or the cloud wants this host back."""
        now_s = self.diary.now_s
        self.stop_request = StopRequest(reason, now_s, None if notice_s is None else now_s + notice_s)

    def is_said_at_the_end(self, *parts: str) -> bool:
        """Whether the last thing that a person was told has all of these in it."""
        return all(part in self.said[-1][1] for part in parts)

    def sentences(self, part: str) -> list[str]:
        """Those with this in it that a person was told."""
        return [text for _, text in self.said if part in text]

    def _check(self) -> str:
        self.diary.note("check")
        return self.unfit

    def _ask_to_flush(self) -> FakeSaverProcess | None:
        self.diary.note("flush")
        return self.saver

    def _committed_step(self) -> int | None:
        self.storage_asked += 1
        if not self.storage_answers:
            return None
        return max(step for since_s, step in self.committed_steps.items() if since_s <= self.diary.elapsed_s)

    def _supervise(self, options: RunConfig) -> Supervisor:
        return Supervisor(
            config=options,
            registry=cast(HostRegistry, self.registry),
            heartbeat=cast(HeartbeatMesh, self.heartbeat),
            workers=cast(WorkerGroup, self.workers),
            recorder=cast(Recorder, self.recorder),
            folder=self.folder,
            expected_hosts=0,
            stop_request=lambda: self.stop_request,
            check_host=self._check,
            free_after=0,
            committed_step=self._committed_step,
            remembered_step=lambda: self.remembered_step,
            ask_to_flush=self._ask_to_flush,
            print_line=lambda text: self.said.append((self.diary.elapsed_s, text)),
            uses_gpus=self.uses_gpus,
            clock=self.diary.clock,
            sleep=self.diary.sleep,
        )


def config(launch: LaunchGroup, fault: FaultGroup, run: RunGroup) -> RunConfig:
    return RunConfig(
        run=run,
        task=TaskGroup("my.Task", {}),
        model={},
        data=DataGroup(),
        train=TrainGroup(steps=10, global_batch=8, micro_batch=4),
        optim=OptimGroup(lr=1e-3),
        parallel=ParallelGroup("ddp"),
        checkpoint=CheckpointGroup(),
        fault=fault,
        preflight=PreflightGroup(),
        telemetry=TelemetryGroup(progress="off"),
        launch=launch,
    )
