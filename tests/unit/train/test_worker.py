"""The life of a worker over several generations, with everything that it does in them made up."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_TRANSPORT,
    EXIT_UNFIT,
    ConfigError,
    DetachedError,
    StopRequestedError,
    TransportError,
)
from elastictrain.fault.launcher_channel import (
    ANY_RANK,
    EXACT,
    Attach,
    Attached,
    Detach,
    Detached,
    FromWorker,
    Introduced,
)
from elastictrain.fault.reasons import ExitClassification
from elastictrain.fault.stop import StopListener, StopRequest
from elastictrain.identity import CHANNEL, Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.liveness.watchdog import Overdue
from elastictrain.telemetry.log import LogPrefix
from elastictrain.train import participant
from elastictrain.train import worker as module
from elastictrain.train.participant import Participant
from elastictrain.train.worker import Worker
from tests.unit.fault.test_launcher_channel import Launcher, wait_for
from tests.unit.train.test_loop import config

LEFT = Detached(EXIT_TRANSPORT, built=True)
HUNG = Overdue(EXIT_TRANSPORT, "no progress for 11.0 s in reduce of step 7 (limit 10 s)", hangs=True)


def environment(number: int, *, rank: int = 1, world_size: int = 2) -> dict[str, str]:
    """What a launcher tells a worker of its next generation."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ELASTICTRAIN_LAUNCHER": "77",
        "ELASTICTRAIN_GENERATION": str(number),
        "ELASTICTRAIN_LAUNCH_FOLDER": "/tmp/launch",
    }


@dataclass
class FakeContext:
    """What is known of one generation."""

    identity: Identity
    check_attached: Callable[[], None]
    generation: Any = None
    group: Any = None
    backend: str = "gloo"
    on_gpu: bool = False
    journal: Any = field(default_factory=lambda: SimpleNamespace(close=lambda: None, flush=lambda: None))
    heartbeats: Any = field(default_factory=lambda: SimpleNamespace(close=lambda: None))

    def for_next(self, identity: Identity) -> "FakeContext":
        return FakeContext(identity, self.check_attached)


@dataclass
class FakeReport:
    """Classifies errors as the real one, and writes nothing."""

    identity: Identity
    hangs: Any
    calls: list[str]
    context: Any = None
    loop: Any = None
    overdue_calls: list[Overdue] = field(default_factory=list)

    def lease_lost(self, reason: str) -> None: ...

    def classify(self, error: BaseException) -> ExitClassification:
        code = getattr(error, "exit_code", EXIT_BUG)
        return ExitClassification(code, str(error), show_stack=False)

    def detached(self, error: Exception) -> Any:
        self.calls.append(f"detached {type(error).__name__}")
        return SimpleNamespace(exit_code=EXIT_TRANSPORT)

    def close_generation(self, context: object, failure: object) -> None:
        self.calls.append("close generation")

    def end_process(self, sentence: str, *, exit_code: int) -> None:
        self.calls.append(f"end with {exit_code}")

    def in_order(self, context: object, loop: object, *, code: int, reason: str) -> None:
        self.calls.append(f"in order {code}")

    def overdue(self, overdue: Overdue) -> None:
        self.overdue_calls.append(overdue)


@dataclass
class FakeHangs:
    calls: list[str]
    waits: bool = True

    def begin(self, context: object) -> None: ...
    def group_formed(self, backend: str, link: object) -> None: ...
    def close(self) -> None: ...
    def keep_record(self) -> None:
        self.calls.append("record of the hang")

    def name_culprits(self, overdue: Overdue) -> str:
        return "; rank 0 hangs"

    def waits_for_another(self, overdue: Overdue) -> bool:
        return self.waits


class FakeLoop:
    """Trains as a test says."""

    def __init__(self, run: Callable[["FakeLoop"], None], number: int) -> None:
        self.number = number
        self.run_it = run
        self.freed = threading.Event()
        self.closed: list[bool | None] = []
        self.state = SimpleNamespace(step=7)
        self.stepper = SimpleNamespace(wrapped=SimpleNamespace(bare=f"model {number}"))
        self.observer = SimpleNamespace(print_line=lambda _: None)
        self.loader = SimpleNamespace(interrupt=self.freed.set)

    def run(self) -> None:
        self.run_it(self)

    def averaged(self) -> nullcontext[None]:
        return nullcontext()

    def close(self, *, finished: bool) -> None:
        self.closed.append(finished)

    def abandon(self) -> None:
        self.closed.append(None)


class World:
    """A worker in a thread of the test, and what it does in each generation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launcher: Launcher | None) -> None:
        self.launcher = launcher
        self.calls: list[str] = []
        self.loops: list[FakeLoop] = []
        self.meetings: list[int] = []  # of this process as which rank
        self.built_upon: list[object] = []
        self.parked: object = None
        """What a standby has given back of its device's memory."""

        self.plan: list[Callable[[FakeLoop], None]] = []
        self.detach_hook: Callable[[], None] = lambda: None
        self.on_forget: Callable[[], None] = lambda: None
        self.on_build: Callable[[], None] = lambda: None
        self.stop = StopListener()
        self.received: JsonLines[FromWorker] = JsonLines(FromWorker)  # type: ignore[arg-type]
        own = {CHANNEL: str(launcher.theirs.fileno())} if launcher is not None else {}
        monkeypatch.setattr(os, "environ", {**os.environ, **environment(1), **own})
        for name in ("check_alone", "claim_memory", "build", "prepare"):
            monkeypatch.setattr(module, name, getattr(self, f"_{name}"))
        for name in ("meet", "form_group", "start_saver", "detach"):
            monkeypatch.setattr(participant, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(module, "detached", self._detached)
        monkeypatch.setattr(module, "refuse_fsdp", lambda bare: self.calls.append(f"refuse {bare}"))
        monkeypatch.setattr(module, "forget_step", self._forget_step)
        monkeypatch.setattr(participant, "leave", lambda group: self.calls.append("leave"))
        monkeypatch.setattr(participant, "await_all", lambda group: self.calls.append("await all"))
        monkeypatch.setattr(module, "forget", lambda: self.calls.append("forget preparation"))
        monkeypatch.setattr(module, "show_sample", lambda *_, **__: None)
        monkeypatch.setattr(module, "set_up_logging", lambda prefix: None)
        monkeypatch.setattr(participant, "HangWatch", lambda *_: FakeHangs(self.calls))
        monkeypatch.setattr(
            participant, "ExitReport", lambda _, identity, tracker, hangs, stop: FakeReport(identity, hangs, self.calls)
        )
        self.tracker, self.prefix = ProgressTracker(), LogPrefix(1, step=lambda: 0)
        identity = participant.read_identity(os.environ)
        channel = launcher.channel if launcher is not None else None
        options = cast(RunConfig, config(steps=3))
        self.worker = Worker(Participant(options, identity, self.tracker, self.prefix, self.stop, 1, channel))
        self.first_report = cast(FakeReport, self.worker.part.report)

    def heard(self) -> list[FromWorker]:
        """What the launcher has received until now."""
        assert self.launcher is not None
        try:
            return list(self.received.feed(self.launcher.connection.recv(1 << 16, 0x40)))
        except BlockingIOError:
            return []

    def _check_alone(
        self, config: object, identity: Identity, *, check_attached: Callable[[], None], **_: object
    ) -> FakeContext:
        self.calls.append("check alone")
        return FakeContext(identity, check_attached)

    def _claim_memory(self, context: FakeContext, *, parked: object) -> None:
        self.calls.append("claim memory")

    def _meet(self, context: FakeContext, **_: object) -> None:
        context.check_attached()
        self.meetings.append(context.identity.rank)
        context.generation = SimpleNamespace(name="000001-aa")

    def _form_group(self, context: FakeContext) -> None:
        self.calls.append("form group")

    def _start_saver(self, context: object, *, agent: int) -> SaverLink:
        return cast(SaverLink, SimpleNamespace(close=lambda: self.calls.append("close link")))

    def _build(self, context: object, link: object, before: object) -> FakeLoop:
        self.on_build()
        self.built_upon.append(before)
        self.loops.append(FakeLoop(self.plan.pop(0), len(self.loops) + 1))
        return self.loops[-1]

    def _prepare(self, context: object, *, exact: bool) -> object:
        self.calls.append("prepare exactly" if exact else "prepare")
        arena = SimpleNamespace(close=lambda: self.calls.append("close the slots")) if exact else None
        return SimpleNamespace(wrapped=SimpleNamespace(bare="prepared"), parked=self.parked, arena=arena)

    def _detach(self, limit_s: float) -> None:
        self.detach_hook()
        self.calls.append(f"abort in {threading.current_thread().name}")
        for loop in self.loops:
            loop.freed.set()

    def _forget_step(self, bare: object) -> None:
        self.on_forget()
        self.calls.append(f"forget {bare}")

    def _detached(self, loop: FakeLoop) -> object:
        self.calls.append("keep what is built")
        return SimpleNamespace(wrapped=loop.stepper.wrapped, parked=None)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _name_as_before() -> Iterator[None]:
    """Workers change the name of their process."""
    before = Path("/proc/self/comm").read_text()
    yield
    Path("/proc/self/comm").write_text(before)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> World:
    return World(monkeypatch, launcher)


def fails(error: Exception) -> Callable[[FakeLoop], None]:
    def run(loop: FakeLoop) -> None:
        raise error

    return run


def trains(loop: FakeLoop) -> None: ...


def blocks(loop: FakeLoop) -> None:
    """In a collective that no rank joins."""
    assert loop.freed.wait(10)
    raise RuntimeError("Connection closed by peer")


def say_later(launcher: Launcher, *messages: Attach | Detach, after_s: float = 0.05) -> None:
    threading.Timer(after_s, launcher.say, messages).start()


class TestRecovery:
    def test_in_the_same_process_with_what_it_has_built(self, world: World, launcher: Launcher) -> None:
        world.plan = [fails(TransportError("reset by peer")), trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby="") == EXIT_OK
        assert world.heard() == [Introduced(), Attached(""), LEFT, Introduced(), Attached("")]
        assert world.meetings == [1, 1]
        first, second = cast(list[Any], world.built_upon)
        assert (first, second.wrapped.bare) == (None, "model 1")
        # Nothing that needs no other rank is done twice.
        assert (world.calls.count("check alone"), world.calls.count("claim memory")) == (1, 1)
        left = [call for call in world.calls if call.partition(" ")[0] in ("abort", "forget", "close")]
        assert left == ["abort in MainThread", "forget model 1", "close link", "close generation"]
        assert world.calls[-2:] == ["in order 0", "leave"]

    def test_the_launcher_need_not_wait_for_a_device(self, world: World, launcher: Launcher) -> None:
        """It finishes what it was given, and the others meet meanwhile."""
        heard: list[FromWorker] = []
        world.on_forget = lambda: heard.extend(world.heard())
        world.plan = [fails(TransportError("reset by peer")), trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby="") == EXIT_OK
        assert heard == [Introduced(), Attached(""), LEFT]
        assert world.heard() == [Introduced(), Attached("")], "it is said once"

    def test_the_next_rank_and_its_end_may_come_while_the_device_is_waited_for(self, world: World, launcher: Launcher) -> None:
        def forget() -> None:
            world.on_forget = lambda: None
            launcher.say(Attach(environment(2)), Detach("rank 0 died again"))
            wait_for(lambda: launcher.channel.detach_reason == "rank 0 died again")

        world.on_forget = forget
        world.plan = [fails(TransportError("reset by peer")), trains]
        say_later(launcher, Attach(environment(3)), after_s=0.3)
        assert world.worker.run(standby="") == EXIT_OK
        assert len(world.meetings) == 2, "it met nobody in the second"
        assert world.heard().count(LEFT) == 2

    def test_a_device_that_is_never_done_ends_the_process(
        self, world: World, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The launcher counts on it already."""
        monkeypatch.setattr(participant, "_DETACH_S", 0.05)
        world.on_forget = lambda: wait_for(lambda: f"end with {EXIT_TRANSPORT}" in world.calls)
        world.plan = [fails(TransportError("reset by peer")), trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby="") == EXIT_OK, "a real process would have ended"
        assert world.calls.count(f"end with {EXIT_TRANSPORT}") == 1

    def test_a_step_that_cannot_be_interrupted_is_freed_all_the_same(self, world: World, launcher: Launcher) -> None:
        def fail() -> None:
            raise ValueError("no")

        world.worker.part.interrupt = fail
        world.plan = [blocks, trains]
        say_later(launcher, Detach("b has failed"))
        say_later(launcher, Attach(environment(2)), after_s=0.3)
        assert world.worker.run(standby="") == EXIT_OK

    @pytest.mark.parametrize("collects", [True, False])
    def test_no_garbage_is_collected_until_it_is_built(self, collects: bool, world: World, launcher: Launcher) -> None:
        seen: list[bool] = []
        world.on_build = lambda: seen.append(gc.isenabled())

        def looks(loop: FakeLoop) -> None:
            seen.append(gc.isenabled())
            if len(seen) == 2:
                raise TransportError("reset by peer")

        world.plan = [looks, looks]
        launcher.say(Attach(environment(2)))
        if not collects:
            gc.disable()
        try:
            assert world.worker.run(standby="") == EXIT_OK
            # The first build has no other rank that waits for it.
            assert seen == [collects, collects, False, collects]
        finally:
            gc.enable()

    def test_everything_of_the_next_generation_is_new(self, world: World, launcher: Launcher) -> None:
        world.stop.quiet = True
        world.stop.request = StopRequest("grow", 0.0)
        world.tracker.first_step_done()
        world.plan = [fails(DetachedError("b has failed")), trains]
        launcher.say(Attach(environment(2, rank=0)))
        assert world.worker.run(standby="") == EXIT_OK
        identity = world.worker.part.identity
        assert identity.launcher is not None
        assert (identity.rank, identity.launcher.generation) == (0, 2)
        assert (world.stop.request, world.stop.quiet) == (None, False)
        assert world.worker.part.report is not world.first_report
        assert cast(FakeReport, world.worker.part.report).identity is identity
        assert (world.prefix.rank, world.tracker.mark.first_step_done) == (0, False)
        assert Path("/proc/self/comm").read_text().strip() == "rank 0"

    def test_the_launcher_frees_it_from_a_collective(self, world: World, launcher: Launcher) -> None:
        """What it raises then is an effect, whatever it looks like."""
        world.plan = [blocks, blocks, trains]
        for number in (1, 2):
            say_later(launcher, Detach("b has failed"), after_s=0.4 * number - 0.3)
            say_later(launcher, Attach(environment(number + 1)), after_s=0.4 * number - 0.1)
        assert world.worker.run(standby="") == EXIT_OK
        assert world.calls.count("abort in launcher-channel") >= 2
        assert world.calls.count("detached RuntimeError") == 2

    def test_a_group_that_is_made_while_it_is_aborted_is_aborted_a_moment_later(self, world: World, launcher: Launcher) -> None:
        aborts: list[int] = []
        world.detach_hook = lambda: aborts.append(1)

        def connects(loop: FakeLoop) -> None:
            wait_for(lambda: len(aborts) >= 3)
            raise RuntimeError("Connection closed by peer")

        world.plan = [connects, trains]
        say_later(launcher, Detach("b has failed"))
        say_later(launcher, Attach(environment(2)), after_s=0.3)
        assert world.worker.run(standby="") == EXIT_OK

    def test_again_and_again(self, world: World, launcher: Launcher) -> None:
        world.plan = [*[fails(TransportError("reset"))] * 5, trains]
        launcher.say(*(Attach(environment(number)) for number in range(2, 7)))
        assert world.worker.run(standby="") == EXIT_OK
        assert len(world.meetings) == 6

    def test_a_generation_that_has_ended_before_it_begins_costs_no_time(self, world: World, launcher: Launcher) -> None:
        """The launcher kills a worker that has not left after a few seconds."""

        def fails_twice(loop: FakeLoop) -> None:
            launcher.say(Attach(environment(2)), Detach("rank 0 died again"))
            wait_for(lambda: launcher.channel.detach_reason)
            raise TransportError("reset")

        world.plan = [fails_twice, trains]
        say_later(launcher, Attach(environment(3)), after_s=0.3)
        began = time.monotonic()
        assert world.worker.run(standby="") == EXIT_OK
        assert time.monotonic() - began < 1.5
        assert len(world.meetings) == 2, "it met nobody in the second"
        assert world.heard().count(LEFT) == 2
        assert world.worker.built is not None, "what it has built outlives that, too"

    def test_not_in_a_process_that_cannot_be_kept(self, world: World, launcher: Launcher) -> None:
        def waits(loop: FakeLoop) -> None:
            say_later(launcher, Detach("b has failed"))
            wait_for(lambda: f"end with {EXIT_TRANSPORT}" in world.calls)
            raise RuntimeError("a real process would have ended")

        world.worker.part.stays = False
        world.plan = [waits]
        with pytest.raises(RuntimeError):
            world.worker.run(standby="")
        assert LEFT not in world.heard()


class TestOrderlyEnd:
    def test_the_process_stays_for_the_next_generation(self, world: World, launcher: Launcher) -> None:
        world.plan = [fails(StopRequestedError("b leaves")), trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby="") == EXIT_OK
        stopped = Detached(EXIT_STOPPED, built=True)
        assert world.heard() == [Introduced(), Attached(""), stopped, Introduced(), Attached("")]
        assert world.meetings == [1, 1]
        assert cast(Any, world.built_upon[1]).wrapped.bare == "model 1"
        # Nobody aborts a group that another rank still needs.
        ended = [call for call in world.calls if call.partition(" ")[0] in ("in", "await", "abort", "forget", "leave")]
        assert ended == ["in order 75", "await all", "abort in MainThread", "forget model 1", "in order 0", "leave"]
        assert [loop.closed for loop in world.loops] == [[None], [True]]

    def test_a_rank_that_is_lost_then_ends_the_generation(
        self, world: World, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(participant, "await_all", lambda group: fails(TransportError("reset"))(world.loops[0]))
        world.plan = [fails(StopRequestedError("b leaves")), trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby="") == EXIT_OK
        assert world.heard()[2] == LEFT
        assert cast(Any, world.built_upon[1]).wrapped.bare == "model 1"
        assert world.calls.count("keep what is built") == 1, "its data workers were released already"

    def test_it_ends_with_its_launcher(self, world: World, launcher: Launcher) -> None:
        world.plan = [fails(StopRequestedError("spot"))]
        threading.Timer(0.1, launcher.connection.close).start()
        assert world.worker.run(standby="") == EXIT_STOPPED


class TestNoRecovery:
    def test_without_a_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(monkeypatch, None)
        world.plan = [fails(TransportError("reset"))]
        with pytest.raises(TransportError):
            world.worker.run(standby="")
        assert "detached TransportError" not in world.calls

    def test_from_an_error_of_its_own(self, world: World) -> None:
        world.plan = [fails(ZeroDivisionError())]
        with pytest.raises(ZeroDivisionError):
            world.worker.run(standby="")
        assert LEFT not in world.heard()

    def test_from_a_request_to_stop_where_nobody_keeps_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(monkeypatch, None)
        world.plan = [fails(StopRequestedError("spot"))]
        assert world.worker.run(standby="") == EXIT_STOPPED
        assert world.calls[-2:] == [f"in order {EXIT_STOPPED}", "leave"]
        assert world.loops[0].closed == [False]

    def test_where_the_groups_cannot_be_aborted(self, world: World) -> None:
        def stuck() -> None:
            raise TimeoutError("not aborted in 2 s")

        world.detach_hook = stuck
        world.plan = [fails(TransportError("reset"))]
        with pytest.raises(TransportError):
            world.worker.run(standby="")
        assert LEFT not in world.heard(), "it ends, and the launcher starts another process"

    def test_after_the_end_of_the_launcher(self, world: World, launcher: Launcher) -> None:
        world.plan = [fails(TransportError("reset"))]
        threading.Timer(0.1, launcher.connection.close).start()
        assert world.worker.run(standby="") == EXIT_TRANSPORT


class TestStandby:
    def test_gets_a_rank(self, world: World, launcher: Launcher) -> None:
        world.plan = [trains]
        say_later(launcher, Attach(environment(2, rank=0)))
        assert world.worker.run(standby=ANY_RANK) == EXIT_OK
        assert world.heard() == [Detached(EXIT_OK, built=True), Introduced(), Attached("")]
        assert world.meetings == [0], "no part of an earlier generation"
        (before,) = cast(list[Any], world.built_upon)
        assert before.wrapped.bare == "prepared"
        assert world.calls.count("check alone") == 1

    def test_that_is_parked_claims_memory_like_a_new_worker(self, world: World, launcher: Launcher) -> None:
        """The dead worker may hold it for a while, so it does not count as ready at once."""
        world.parked = object()
        world.plan = [trains]
        say_later(launcher, Attach(environment(2)))
        assert world.worker.run(standby=EXACT) == EXIT_OK
        assert world.heard()[0] == Detached(EXIT_OK, built=False)
        assert (world.calls.count("prepare exactly"), world.calls.count("claim memory")) == (1, 1)
        assert cast(Any, world.built_upon[0]).wrapped.bare == "prepared"

    def test_without_room_on_its_device_ends(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "has_room", lambda context: False)
        assert world.worker.run(standby=EXACT) == EXIT_OK
        assert (world.heard(), world.calls.count("prepare exactly")) == ([], 0)

    def test_gets_it_while_it_prepares(self, world: World, launcher: Launcher) -> None:
        world.plan = [trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby=ANY_RANK) == EXIT_OK
        assert world.heard() == [Detached(EXIT_OK, built=True), Introduced(), Attached("")]

    def test_whose_preparation_fails_builds_like_a_new_worker(
        self, world: World, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "prepare", fails(RuntimeError("out of memory")))
        world.plan = [trains]
        launcher.say(Attach(environment(2)))
        assert world.worker.run(standby=ANY_RANK) == EXIT_OK
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert world.built_upon == [None]
        assert (world.calls.count("claim memory"), world.calls.count("forget preparation")) == (1, 1)

    def test_that_finds_something_wrong_ends_and_leaves_the_report_to_a_rank(
        self, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "check_alone", lambda *_, **__: fails(ConfigError("wrong"))(world.loops[0]))
        world.loops.append(FakeLoop(trains, 1))
        assert world.worker.run(standby=ANY_RANK) == EXIT_UNFIT
        assert world.heard() == []
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

    def test_of_a_world_that_has_changed_builds_anew(self, world: World, launcher: Launcher) -> None:
        world.plan = [trains]
        launcher.say(Attach(environment(2, world_size=3)))
        assert world.worker.run(standby=ANY_RANK) == EXIT_OK
        assert world.built_upon == [None]
        assert world.calls.count("claim memory") == 1

    def test_whose_rank_is_another_one_gives_up_the_slots_that_it_has_locked(self, world: World, launcher: Launcher) -> None:
        world.plan = [trains]
        launcher.say(Attach(environment(2, world_size=3)))
        assert world.worker.run(standby=EXACT) == EXIT_OK
        assert world.calls.count("close the slots") == 1

    def test_that_is_not_needed_ends_well(self, world: World, launcher: Launcher) -> None:
        launcher.connection.close()
        assert world.worker.run(standby=ANY_RANK) == EXIT_OK
        assert world.meetings == []

    def test_waits_in_a_phase_without_limit(self, world: World, launcher: Launcher) -> None:
        seen: list[Phase] = []
        threading.Timer(0.1, lambda: (seen.append(world.tracker.mark.phase), launcher.connection.close())).start()
        world.worker.run(standby=ANY_RANK)
        assert seen == [Phase.STANDBY]


class TestBeingOverdue:
    """The watchdog calls again and again."""

    def overdue(self, world: World) -> list[Overdue]:
        return cast(FakeReport, world.worker.part.report).overdue_calls

    def test_who_waits_for_another_leaves_the_generation_and_not_the_process(self, world: World, launcher: Launcher) -> None:
        def waits(loop: FakeLoop) -> None:
            for _ in range(3):
                threading.Thread(target=world.worker.part.end, args=(HUNG,)).start()
            blocks(loop)

        world.plan = [waits, trains]
        say_later(launcher, Attach(environment(2)), after_s=0.3)
        assert world.worker.run(standby="") == EXIT_OK
        assert world.calls.count("record of the hang") == 1
        assert (self.overdue(world), world.first_report.overdue_calls) == ([], [])
        assert world.heard().count(LEFT) == 1

    def test_who_cannot_be_freed_ends(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(participant, "_FREE_S", 0.1)
        world.worker.part.end(HUNG)
        world.worker.part.end(HUNG)
        assert self.overdue(world) == []
        time.sleep(0.15)
        world.worker.part.end(HUNG)
        assert self.overdue(world) == [HUNG]

    def test_who_hangs_itself_ends(self, world: World) -> None:
        cast(FakeHangs, world.worker.part.report.hangs).waits = False
        world.worker.part.end(HUNG)
        assert self.overdue(world) == [HUNG]

    def test_who_is_to_stop_ends(self, world: World) -> None:
        stopped = Overdue(EXIT_STOPPED, "asked to stop", show_stacks=False)
        world.worker.part.end(stopped)
        assert self.overdue(world) == [stopped]

    def test_without_a_launcher_it_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(monkeypatch, None)
        world.worker.part.end(HUNG)
        assert self.overdue(world) == [HUNG]

    def test_it_counts_for_one_generation(self, world: World, launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(participant, "_FREE_S", 0.0)

        def waits(loop: FakeLoop) -> None:
            threading.Thread(target=world.worker.part.end, args=(HUNG,)).start()
            blocks(loop)

        world.plan = [waits, waits, trains]
        say_later(launcher, Attach(environment(2)), after_s=0.3)
        say_later(launcher, Attach(environment(3)), after_s=0.6)
        assert world.worker.run(standby="") == EXIT_OK
        assert world.calls.count("record of the hang") == 2
