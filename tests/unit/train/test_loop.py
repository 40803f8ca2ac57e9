"""The loop with a stepper that computes nothing: who settles what when, and what follows."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor, nn

from elastictrain.bounded_json import JsonLines
from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.checkpoint.evaluations import EvaluationLosses
from elastictrain.checkpoint.save_interval import FailureCounts
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
from elastictrain.data.loader import Loader
from elastictrain.distributed.generation import AgreedGeneration, Introduction
from elastictrain.errors import (
    CheckpointError,
    DetachedError,
    NonFiniteError,
    ReplicasDivergedError,
    SavesFailingError,
    StopRequestedError,
    TransportError,
)
from elastictrain.events import (
    CheckpointFailed,
    Evaluated,
    Event,
    Recovery,
    SaveIntervalChosen,
    Skip,
    Step,
    StepSkipped,
    StragglerFound,
)
from elastictrain.fault.launcher_channel import FromWorker, LeaveOutSlow
from elastictrain.fault.reasons import SlowRank
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity, Launcher, RecoveryPlan
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.start_times import StartTimes
from elastictrain.train.evaluate import Evaluation, Evaluator
from elastictrain.train.evaluation_history import EvaluationHistory
from elastictrain.train.loop import Loop
from elastictrain.train.observing import Observer
from elastictrain.train.optimizer import learning_rate, make_optimizers
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import Reached, SynchronousSaving
from elastictrain.train.state import TrainState
from elastictrain.train.step import StepFlags, Stepper, StepResult
from elastictrain.train.straggler import IN_A_ROW, WINDOW_STEPS, StragglerFinder
from elastictrain.train.weight_average import WeightAverage
from tests.unit.train.parts import FakeComparison, context_of

BATCH = 4
WALL_S = 1_700_000_000.0
RANKS = (Introduction("here", 2, "gloo", "d", 71), Introduction("here", 2, "gloo", "d", 72, stayed=True))


def config(
    *,
    steps: int,
    save_every: int | Literal["auto"] = 0,
    every_minutes: float = 0.0,
    eval_every: int = 0,
    max_skipped: int = 2,
    max_failed_saves: int = 3,
) -> RunConfig:
    return RunConfig(
        run=RunGroup(dir="memory://run"),
        task=TaskGroup(target="x.Y", options={}),
        model={},
        data=DataGroup(),
        train=TrainGroup(
            steps=steps, global_batch=BATCH, micro_batch=BATCH, eval_every_steps=eval_every, max_skipped=max_skipped
        ),
        optim=OptimGroup(warmup_steps=3),
        parallel=ParallelGroup(kind="ddp"),
        checkpoint=CheckpointGroup(every_steps=save_every, every_minutes=every_minutes, max_failed_saves=max_failed_saves),
        fault=FaultGroup(),
        launch=LaunchGroup(),
        preflight=PreflightGroup(level="off"),
        telemetry=TelemetryGroup(log_every_steps=1),
    )


@dataclass
class Pending:
    """Figures of a fake step."""

    known: StepResult

    def result(self) -> StepResult:
        return self.known


@dataclass
class World:
    """Everything around the loop, with a memory of what happened."""

    config: RunConfig
    rank: int = 0
    local_ranks: int = 2
    first: int = 0
    stop_at: int | None = None
    """A signal comes while this step is being computed."""

    detached_at: int | None = None
    """The launcher ends the generation while this step is being computed: what its collectives return counts for nothing."""

    launcher: Launcher | None = None
    in_storage: bool = True
    other_reason: str = ""
    """Of another rank, told in collectives of their own only."""

    eval_asks_at: int | None = None
    """A signal comes while this step is being evaluated."""

    known_evaluation: int | None = None
    """The newest one that the job has completed; None if it has just begun."""

    times: Tensor | None = None
    """Of the ranks in each step."""

    failures: FailureCounts = FailureCounts()  # noqa: RUF009  # frozen
    """Of the job, before this generation."""

    trained: list[FailureCounts] = field(default_factory=list)
    save_s: float = 0.0
    """How long a save makes training wait."""

    skipped: tuple[int, ...] = ()
    """Steps that failed again and again."""

    losses: dict[int, float] = field(default_factory=dict)
    refuse_saves: int = 0
    step_s: float = 1.0
    launched: list[int] = field(default_factory=list)
    saved: list[tuple[int, str]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    noted: list[int] = field(default_factory=list)
    """Evaluations, as the job notes them."""

    flushed: list[list[int]] = field(default_factory=list)
    """The steps on record at each flush."""

    flushed_before_save: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    shown: list[tuple[int, int]] = field(default_factory=list)
    """Steps, and how many were skipped until then."""

    held_out: dict[int, float] = field(default_factory=dict)
    """The losses of evaluations that are not 2."""

    before: EvaluationLosses | None = None
    """What is known of earlier evaluations, where a key asks for it."""

    averaged: bool = False
    """The average of the weights is 7."""

    order: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    hooked: list[tuple[str, int]] = field(default_factory=list)
    now_s: float = 0.0
    detached: bool = False
    loop: Loop | None = None
    request: StopRequest | None = None
    said: list[str] = field(default_factory=list)
    comparison: FakeComparison = field(default_factory=FakeComparison)

    # The stepper.
    @property
    def wrapped(self) -> SimpleNamespace:
        return SimpleNamespace(groups=())

    def run(
        self, step: int, micro_batches: Iterator[object], *, passes: int, rate: float, flags: Callable[[], StepFlags]
    ) -> Pending:
        self.launched.append(step)
        self.now_s += self.step_s
        self.detached = self.detached or step == self.detached_at
        if step == self.stop_at:
            self.request = StopRequest("SIGUSR1", self.now_s)
        return Pending(StepResult(step, rate, self.losses.get(step, 1.0), 0.5, flags(), self.times))

    # The checkpointer.
    def save(self, step: int, *, reason: str, **_: object) -> None:
        self.flushed_before_save.append(len(self.flushed))
        if self.refuse_saves:
            self.refuse_saves -= 1
            raise CheckpointError("no space left")
        self.now_s += self.save_s
        self.saved.append((step, reason))

    def train(self) -> Loop:
        model = nn.Linear(1, 1)
        average = WeightAverage.of(model, decay=0.5) if self.averaged else None
        if average is not None:
            average.averages["weight"].fill_(7.0)
        state = TrainState(model, make_optimizers(model, self.config.optim), step=self.first, average=average)
        evaluator = _Evaluator(self) if self.config.train.eval_every_steps else None
        self.tracker = tracker = ProgressTracker()
        observer = _Observer(self)
        comparison = cast(ReplicaComparison, self.comparison)
        context = context_of(
            config=self.config,
            task=self,
            identity=Identity(
                self.rank, 2, self.rank % self.local_ranks, self.local_ranks, "here", launched=True, launcher=self.launcher
            ),
            check_attached=self.check_attached,
            times=StartTimes({"build": 1.5}, clock=lambda: self.now_s),
            began=WALL_S + 2.0,
            generation=AgreedGeneration("000002-bb", RANKS),
            tracker=tracker,
            job=SimpleNamespace(
                evaluated=self.known_evaluation,
                evaluation_done=self.noted.append,
                committed=lambda step: None,
                memory=JobMemory(failures=self.failures),
                trained=self.trained.append,
            ),
            backend="gloo",
            journal=SimpleNamespace(record=self.events.append, flush=lambda: self.flushed.append(self.of(Step))),
            stop_request=lambda: self.request,
            store=SimpleNamespace(write=self.stored.__setitem__),
            any_stop_reason=lambda: self.request.reason if self.request is not None else self.other_reason,
        )
        saving = SynchronousSaving(context, cast(Checkpointer, self), state, comparison, None, observer)
        loop = self.loop = Loop(
            context=context,
            state=state,
            stepper=cast(Stepper, self),
            loader=cast(Loader, repeat(None)),
            saving=saving,
            comparison=comparison,
            evaluator=cast(Evaluator | None, evaluator),
            ledger=None,
            observer=observer,
            tokens_per_sample=10,
            in_storage=self.in_storage,
            skipped=dict.fromkeys(self.skipped, ()),
            history=EvaluationHistory(context, self.before) if self.before is not None else None,
            stragglers=StragglerFinder() if self.times is not None else None,
            clock=lambda: self.now_s,
        )
        loop.run()
        return loop

    def check_attached(self) -> None:
        if self.detached:
            raise DetachedError("a worker has died")

    # The task's hooks.
    def on_restart(self, step: int) -> None:
        self.hooked.append(("restart", step))

    def on_step(self, step: Step) -> None:
        self.hooked.append(("step", step.step))

    def on_eval(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        assert (loss, metrics) == (self.held_out.get(step, 2.0), {"accuracy": 0.5})
        self.hooked.append(("eval", step))

    def of(self, kind: type[Event]) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]  # type: ignore[attr-defined]


@dataclass
class _Evaluator:
    world: World
    num_samples: int = 3

    def run(self, step: int, *, leave: Callable[[], bool]) -> Evaluation | None:
        if step == self.world.eval_asks_at:
            self.world.request = StopRequest("SIGUSR2", self.world.now_s)
        if leave():
            return None
        self.world.evaluated.append(step)
        assert self.world.loop is not None
        seven = self.world.loop.state.model.get_parameter("weight").item() == 7.0
        self.world.order.append("averaged" if seven else "plain")
        return Evaluation(self.world.held_out.get(step, 2.0), {"accuracy": 0.5})


@dataclass
class _Observer(Observer):
    world: World

    def on_step(self, step: Step, *, step_s: float, skipped_total: int) -> None:
        self.world.shown.append((step.step, skipped_total))

    def print_line(self, text: str) -> None:
        self.world.said.append(text)


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits of collectives that were set; there are no groups to set them for."""
    limits_s: list[float] = []
    monkeypatch.setattr(
        "elastictrain.train.loop.limit_collectives", lambda groups, *, backend, timeout_s: limits_s.append(timeout_s)
    )
    return limits_s


@pytest.mark.parametrize(
    ("first", "known", "evaluated"),
    [
        (4, 2, [4, 6]),
        # It was completed before the failure, or the job does not know.
        (4, 4, [6]),
        (4, None, [6]),
        (5, 2, [6]),
        (0, 0, [2, 4, 6]),
        (7, 0, []),
    ],
)
def test_an_evaluation_that_a_failure_cut_short_is_made_up_for(first: int, known: int | None, evaluated: list[int]) -> None:
    world = World(config(steps=7, eval_every=2), first=first, known_evaluation=known)
    world.train()
    assert world.evaluated == world.of(Evaluated) == [*evaluated, *([7] if first < 7 else [])]
    # What is made up for is noted before it begins: it may be what ended the last generation.
    assert world.noted == [*evaluated[: evaluated[:1] == [first]], *world.evaluated]


@pytest.mark.parametrize("in_storage", [True, False])
def test_a_stop_during_an_evaluation_that_is_made_up_for_costs_no_step(in_storage: bool) -> None:
    world = World(config(steps=7, eval_every=2), first=4, known_evaluation=2, eval_asks_at=4, in_storage=in_storage)
    with pytest.raises(StopRequestedError):
        world.train()
    assert (world.launched, world.evaluated) == ([], [])
    assert world.saved == ([] if in_storage else [(4, "stop")])


@pytest.mark.parametrize("save_every", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("eval_every", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_every_step_is_done_settled_and_recorded_once_and_in_order(
    save_every: int, eval_every: int, first: int, limited: list[float]
) -> None:
    world = World(config(steps=7, save_every=save_every, eval_every=eval_every), first=first)
    world.train()
    steps = list(range(first + 1, 8))
    assert world.launched == steps
    assert world.of(Step) == steps
    assert world.shown == [(step, 0) for step in steps]
    assert limited == [world.config.fault.step_timeout_s]
    due = [step for step in steps if (save_every and step % save_every == 0) or step == 7]
    assert world.saved == [(step, "end" if step == 7 else "interval") for step in due]
    assert world.of(Evaluated) == world.evaluated == world.noted
    assert world.evaluated == [step for step in steps if eval_every and (step % eval_every == 0 or step == 7)]


@pytest.mark.parametrize("averaged", [True, False])
def test_an_evaluation_sees_the_average_once_no_snapshot_reads_the_weights(
    averaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(config(steps=4, eval_every=2), averaged=averaged)
    monkeypatch.setattr(SynchronousSaving, "before_update", lambda self: world.order.append("awaited"))
    world.train()
    assert world.order == ["awaited", "averaged" if averaged else "plain"] * 2
    assert world.loop is not None
    assert world.loop.state.model.get_parameter("weight").item() != 7.0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_hooks_of_the_task_are_called_on_every_rank_in_the_order_of_steps(rank: int) -> None:
    world = World(config(steps=5, eval_every=2), first=1, rank=rank)
    world.train()
    steps: list[tuple[str, int]] = [("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4), ("step", 5), ("eval", 5)]
    assert world.hooked == [("restart", 1), *steps]


def patient(*, patience: int, save_every: int = 0) -> RunConfig:
    plain = config(steps=20, eval_every=2, save_every=save_every)
    return replace(plain, train=replace(plain.train, stop_after_evals_without_gain=patience))


def losses_of(found: dict[int, float]) -> EvaluationLosses:
    return EvaluationLosses(tuple(found.items()))


@pytest.mark.parametrize("save_every", [0, 1, 4])
@pytest.mark.parametrize(
    ("first", "known", "end"),
    [
        (0, {}, 8),
        (3, {2: 3.0}, 8),
        (4, {2: 3.0, 4: 1.0}, 8),
        (4, {2: 3.0}, 8),  # the evaluation after the restored step is not known
        (8, {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.0}, 8),
        (8, {2: 3.0, 4: 1.0, 6: 2.0}, 8),
    ],
)
def test_training_ends_after_so_many_evaluations_without_gain_wherever_it_resumed(
    first: int, known: dict[int, float], end: int, save_every: int
) -> None:
    """The lowest loss is that after step 4."""
    world = World(patient(patience=2, save_every=save_every), first=first, before=losses_of(known), held_out={2: 3.0, 4: 1.0})
    world.train()
    assert world.launched == list(range(first + 1, end + 1))
    assert world.loop is not None
    assert world.loop.history is not None
    assert world.loop.history.evaluations.losses == ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.0))
    if first < end:
        assert world.saved[-1] == (end, "end")
        assert world.loop.reached == Reached(end, "storage")
        assert list(world.stored) == ["evaluations.json"]


def test_only_rank_0_notes_evaluations() -> None:
    world = World(patient(patience=2), rank=1, before=EvaluationLosses(), held_out={2: 3.0, 4: 1.0})
    world.train()
    assert (world.launched[-1], world.stored) == (8, {})


def test_a_gain_in_time_lets_training_go_on() -> None:
    world = World(patient(patience=2), before=EvaluationLosses(), held_out={step: 1.0 / step for step in range(4, 21, 4)})
    world.train()
    assert world.launched[-1] == 20


def test_a_step_event_says_what_was_consumed_at_which_rate() -> None:
    world = World(config(steps=5), first=2)
    world.train()
    steps = [event for event in world.events if isinstance(event, Step)]
    assert [event.positions for event in steps] == [(8, 12), (12, 16), (16, 20)]
    assert [event.lr for event in steps] == [learning_rate(step, world.config.optim, total_steps=5) for step in (3, 4, 5)]
    assert all(event.tokens_per_s > 0 for event in steps)


def test_a_run_that_is_done_does_nothing() -> None:
    world = World(config(steps=5), first=5)
    world.train()
    assert (world.launched, world.saved, world.events) == ([], [], [])


def test_a_run_that_is_past_its_end_says_so() -> None:
    world = World(config(steps=7), first=9)
    world.train()
    assert world.launched == []
    (said,) = world.said
    assert [word for word in said.split() if word.isdecimal()] == ["9", "7"]


def test_a_store_that_fails_is_asked_again_when_the_minutes_have_passed_and_not_at_each_step() -> None:
    world = World(config(steps=14, save_every=0, every_minutes=0.1), refuse_saves=1)
    world.train()
    assert [event.step for event in world.events if isinstance(event, CheckpointFailed)] == [7]
    assert world.saved == [(14, "end")]


def test_a_save_that_is_pending_follows_the_next_step_when_it_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(config(steps=9, save_every=0))
    monkeypatch.setattr(SynchronousSaving, "save_pending", property(lambda self: world.launched[-1] >= 5 and not world.saved))
    world.train()
    assert world.saved == [(5, "time"), (9, "end")]
    assert world.flushed[0] == [1, 2, 3, 4, 5]


def test_only_rank_0_records_and_every_rank_saves() -> None:
    world = World(config(steps=4, save_every=2, eval_every=2), rank=1)
    world.train()
    assert world.events == []
    assert world.saved == [(2, "interval"), (4, "end")]


@pytest.mark.parametrize("stop_at", [2, 5, 6])
@pytest.mark.parametrize("save_every", [0, 1, 2, 3])
@pytest.mark.parametrize("eval_every", [0, 1, 2])
def test_a_stop_is_obeyed_within_three_steps_whatever_else_happens_at_each_step(
    stop_at: int, save_every: int, eval_every: int
) -> None:
    world = World(config(steps=100, save_every=save_every, eval_every=eval_every), stop_at=stop_at)
    with pytest.raises(StopRequestedError, match="SIGUSR1"):
        world.train()
    assert stop_at <= world.launched[-1] <= stop_at + 3
    assert world.saved[-1][0] == world.launched[-1]
    assert world.of(Step) == world.launched


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_stop_of_another_rank_is_obeyed_too(save_every: int) -> None:
    world = World(config(steps=100, save_every=save_every))
    real = world.run

    def run(step: int, micro_batches: Iterator[object], *, passes: int, rate: float, flags: Callable[[], StepFlags]) -> Pending:
        pending = real(step, micro_batches, passes=passes, rate=rate, flags=flags)
        return Pending(replace(pending.known, flags=replace(pending.known.flags, stop=step >= 4)))

    world.run = run  # type: ignore[method-assign]
    with pytest.raises(StopRequestedError, match="another rank"):
        world.train()
    assert world.saved[-1] == (world.launched[-1], "stop")
    assert world.launched[-1] <= 6


@pytest.mark.parametrize("save_every", [0, 1])
@pytest.mark.parametrize("eval_every", [0, 1])
@pytest.mark.parametrize("first", [0, 3])
def test_a_stop_while_the_first_step_compiles_is_obeyed_after_it(first: int, save_every: int, eval_every: int) -> None:
    world = World(config(steps=100, save_every=save_every, eval_every=eval_every), first=first, stop_at=first + 1)
    with pytest.raises(StopRequestedError, match="SIGUSR1"):
        world.train()
    assert world.launched == world.of(Step) == [first + 1]
    assert world.saved[-1] == (first + 1, "stop")
    assert world.evaluated == []


@pytest.mark.parametrize("save_every", [0, 4])
def test_an_evaluation_is_broken_off(save_every: int) -> None:
    world = World(config(steps=100, save_every=save_every, eval_every=2), eval_asks_at=4)
    with pytest.raises(StopRequestedError, match="SIGUSR2"):
        world.train()
    assert (world.evaluated, world.launched) == ([2], [1, 2, 3, 4])
    assert world.of(Step) == world.launched
    assert world.saved[-1] == (4, "stop")


@pytest.mark.parametrize("first", [0, 3])
def test_a_stop_before_the_first_step_leaves_at_once(first: int) -> None:
    world = World(config(steps=100), first=first, request=StopRequest("SIGTERM", 0.0))
    with pytest.raises(StopRequestedError, match="SIGTERM"):
        world.train()
    assert (world.launched, world.saved) == ([], [])


def test_a_stop_of_another_host_before_the_first_step_has_its_reason() -> None:
    world = World(config(steps=100), other_reason="notice")
    with pytest.raises(StopRequestedError, match="notice"):
        world.train()
    assert world.launched == []


def test_a_step_that_only_memory_has_is_saved_before_leaving_with_it() -> None:
    world = World(config(steps=100), first=3, request=StopRequest("SIGTERM", 0.0), in_storage=False)
    with pytest.raises(StopRequestedError, match="SIGTERM"):
        world.train()
    assert (world.launched, world.saved) == ([], [(3, "stop")])


@pytest.mark.parametrize("asked", [False, True])
def test_a_last_step_that_only_memory_has_is_saved_before_memory_is_given_back(asked: bool) -> None:
    request = StopRequest("SIGTERM", 0.0) if asked else None
    world = World(config(steps=5), first=5, request=request, in_storage=False)
    world.train()
    assert (world.launched, world.saved) == ([], [(5, "end")])


def test_a_last_step_that_does_not_reach_storage_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver of a run that is done gives memory back."""
    monkeypatch.setattr(SynchronousSaving, "save_now", lambda self, step, reason: Reached(step, "memory"))
    world = World(config(steps=5), stop_at=5)
    with pytest.raises(StopRequestedError, match="SIGUSR1"):
        world.train()
    assert world.launched == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stop_at", [6, 7])
def test_a_stop_at_the_very_end_is_the_end(stop_at: int) -> None:
    world = World(config(steps=7), stop_at=stop_at)
    world.train()
    assert world.saved == [(7, "end")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("eval_every", [0, 1])
def test_the_clock_of_rank_0_decides_when_minutes_have_passed(rank: int, eval_every: int) -> None:
    world = World(config(steps=30, every_minutes=1.0, eval_every=eval_every), rank=rank, step_s=10.0)
    world.train()
    by_time = [step for step, reason in world.saved if reason == "time"]
    if rank == 0:
        assert 2 <= len(by_time) <= 5
        assert all(later - earlier >= 6 for earlier, later in pairwise(by_time))
    else:
        assert by_time == []


def test_what_is_not_finite_is_an_event_and_counted() -> None:
    world = World(config(steps=6), losses={2: math.nan, 4: math.inf, 5: math.nan})
    world.train()
    assert world.of(Skip) == [2, 4, 5]
    assert [event.in_a_row for event in world.events if isinstance(event, Skip)] == [1, 1, 2]
    assert world.of(Step) == [1, 2, 3, 4, 5, 6]
    assert world.shown[-1] == (6, 3)


@pytest.mark.parametrize("max_skipped", [0, 1, 3])
def test_one_more_in_a_row_than_allowed_ends_the_run_after_they_were_recorded(max_skipped: int) -> None:
    world = World(config(steps=100, max_skipped=max_skipped), losses=dict.fromkeys(range(3, 100), math.nan))
    last = 3 + max_skipped
    message = rf"{max_skipped + 1} steps in a row .* step {last} \(loss nan\); `train.max_skipped` allows {max_skipped}\."
    with pytest.raises(NonFiniteError, match=message):
        world.train()
    assert world.of(Step) == [*range(1, last + 1)]
    # Not the one after it, which is under way: the launcher tells by the step whether it fails again and again.
    assert world.tracker.mark.step == last


def test_what_a_checkpoint_covers_is_flushed_before_it() -> None:
    world = World(config(steps=7, save_every=3))
    world.train()
    assert world.flushed == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    assert world.flushed_before_save == [1, 2, 3]


def test_a_save_that_fails_is_an_event_and_tried_again_at_the_next_interval() -> None:
    world = World(config(steps=6, save_every=2), refuse_saves=1)
    world.train()
    assert world.of(CheckpointFailed) == [2]
    assert world.saved == [(4, "interval"), (6, "end")]


def test_a_save_that_succeeds_ends_the_row_of_failures() -> None:
    world = World(config(steps=40, save_every=2))
    real = world.save

    def save(step: int, **_: object) -> None:
        world.refuse_saves = int(step % 8 != 0)
        real(step, **_)

    world.config = replace(world.config, checkpoint=replace(world.config.checkpoint, max_failed_saves=4))
    world.save = save  # type: ignore[method-assign]
    world.train()
    assert [step for step, _ in world.saved] == [8, 16, 24, 32, 40]
    assert len(world.of(CheckpointFailed)) == 15


def test_the_last_save_is_tried_again_at_once() -> None:
    world = World(config(steps=3), refuse_saves=2)
    world.train()
    assert world.of(CheckpointFailed) == [3, 3]
    assert world.saved == [(3, "end")]


def test_too_many_failed_saves_in_a_row_end_the_run() -> None:
    world = World(config(steps=100, save_every=2), refuse_saves=100)
    with pytest.raises(SavesFailingError) as caught:
        world.train()
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert world.of(CheckpointFailed) == [2, 4, 6]


def test_what_breaks_the_group_is_no_failed_save() -> None:
    world = World(config(steps=6, save_every=2))

    def save(step: int, **_: object) -> None:
        raise TransportError("gone")

    world.save = save  # type: ignore[method-assign]
    with pytest.raises(TransportError):
        world.train()
    assert world.of(CheckpointFailed) == []


def test_replicas_that_differ_end_the_run_before_anything_is_saved_of_the_step() -> None:
    world = World(config(steps=9, save_every=2), comparison=FakeComparison(diverge_at=4))
    with pytest.raises(ReplicasDivergedError):
        world.train()
    assert world.comparison.launched == [1, 2, 3, 4]
    assert world.comparison.begun == [2, 4]
    assert (world.saved, world.of(CheckpointFailed)) == ([(2, "interval")], [])


def test_replicas_are_compared_between_saves_when_the_next_step_is_under_way() -> None:
    world = World(config(steps=9), comparison=FakeComparison(diverge_at=4, begun=[2, 4, 6]))
    with pytest.raises(ReplicasDivergedError):
        world.train()
    assert (world.launched, world.of(Step), world.saved) == ([1, 2, 3, 4, 5], [1, 2, 3, 4], [])


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("save_every", [0, 1])
def test_what_an_aborted_group_returns_is_taken_for_no_step(at: int, save_every: int) -> None:
    """A sum that was cut short looks like any other."""
    world = World(config(steps=5, save_every=save_every), detached_at=at)
    with pytest.raises(DetachedError):
        world.train()
    assert all(step < at for step in [*world.of(Step), *(step for step, _ in world.saved)])
    assert world.loop is not None
    assert world.tracker.mark.finished_step == max(world.of(Step), default=0)
    assert len(world.of(Step)) >= at - 2, "all before the one that was under way are finished"


def recovering(folder: Path, *, step: int) -> Launcher:
    plan = RecoveryPlan("in_place", ("rank 1 on here",), "SIGKILL", WALL_S, step)
    return Launcher(7, 2, restarted=True, folder=str(folder), recovery=plan)


@pytest.mark.parametrize(
    ("known", "resumed", "repeated"),
    [
        (6, 4, 2),
        (9, 4, 5),
        # Nothing was lost.
        (0, 6, 0),
        (0, 8, 0),
    ],
)
def test_a_recovery_is_recorded_with_its_first_step(
    known: int, resumed: int, repeated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastictrain.train.attachment.event_time", lambda: WALL_S + 10.0)
    world = World(config(steps=resumed + 2), first=resumed, launcher=recovering(tmp_path, step=known))
    world.train()
    (event,) = [event for event in world.events if isinstance(event, Recovery)]
    assert (event.rung, event.lost, event.reason, event.world_size) == ("in_place", ("rank 1 on here",), "SIGKILL", 2)
    assert (event.resumed_step, event.steps_repeated, event.pids) == (resumed, repeated, {"0": 71, "1": 72})
    assert event.seconds == {"launcher": 2.0, "build": 1.5, "first_step": world.step_s, "total": 10.0}
    kinds = [type(one) for one in world.events]
    assert kinds.index(Step) < kinds.index(Recovery), "training goes on"


def test_one_rank_records_a_recovery_and_only_where_there_is_one(tmp_path: Path) -> None:
    for world in (
        World(config(steps=3), rank=1, launcher=recovering(tmp_path, step=0)),
        World(config(steps=3), launcher=replace(recovering(tmp_path, step=0), recovery=None)),
        World(config(steps=3)),
    ):
        world.train()
        assert [event for event in world.events if isinstance(event, Recovery)] == []


NAMED_AT = IN_A_ROW * WINDOW_STEPS
SLOW_SECOND = torch.tensor([[0.3, 0.0, 0.1, 0.2, 0.0, 0.0], [0.3, 0.0, 0.2, 0.2, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_records_a_straggler_once(rank: int) -> None:
    world = World(config(steps=3 * NAMED_AT), rank=rank, times=SLOW_SECOND)
    world.train()
    found = [event for event in world.events if isinstance(event, StragglerFound)]
    expected = StragglerFound(NAMED_AT, 1, "here", "forward", 0.2, 0.1, 0.3, NAMED_AT, False)
    assert found == ([expected] if rank == 0 else [])
    assert len(world.said) == len(found)


def with_channel(folder: Path) -> Launcher:
    """What is told to it goes to a file, which stays open."""
    channel = os.open(folder / "channel", os.O_WRONLY | os.O_CREAT)
    return Launcher(1, 1, False, str(folder), channel=channel)


def to_leave_out(launcher: Launcher) -> SlowRank | None:
    lines: JsonLines[FromWorker] = JsonLines(FromWorker)  # type: ignore[arg-type]
    told = lines.feed(Path(launcher.folder, "channel").read_bytes())
    slow = [one.slow for one in told if isinstance(one, LeaveOutSlow)]
    return slow[-1] if slow else None


@pytest.mark.parametrize(
    ("after", "rank", "local_ranks", "asks"),
    [
        (0, 1, 1, False),
        (2 * NAMED_AT, 1, 1, True),
        # The first rank of the straggler's host asks, and no other host.
        (2 * NAMED_AT, 0, 1, False),
        (2 * NAMED_AT, 0, 2, True),
        (2 * NAMED_AT, 1, 2, False),
        # It is named, but not for long enough.
        (3 * NAMED_AT + 1, 1, 1, False),
    ],
)
def test_the_launcher_of_the_straggler_is_asked_to_leave_its_host_out(
    after: int, rank: int, local_ranks: int, asks: bool, tmp_path: Path
) -> None:
    plain = config(steps=3 * NAMED_AT)
    of_run = replace(plain, fault=replace(plain.fault, straggler_exclude_after=after))
    launcher = with_channel(tmp_path)
    world = World(of_run, rank=rank, times=SLOW_SECOND, launcher=launcher, local_ranks=local_ranks)
    world.train()
    assert bool(to_leave_out(launcher)) == asks
    os.close(launcher.channel)


class Recovering(World):
    """The slow rank is as fast as the other one soon after it was named."""

    asked = False

    def run(
        self, step: int, micro_batches: Iterator[object], *, passes: int, rate: float, flags: Callable[[], StepFlags]
    ) -> Pending:
        assert self.launcher is not None
        if step == NAMED_AT + 5:
            self.asked, self.times = to_leave_out(self.launcher) is not None, SLOW_SECOND[:1].expand(2, -1)
        return super().run(step, micro_batches, passes=passes, rate=rate, flags=flags)


def test_the_request_is_withdrawn_when_the_host_does_not_hold_up_the_others_any_more(tmp_path: Path) -> None:
    plain = config(steps=(2 * IN_A_ROW + 2) * WINDOW_STEPS)
    of_run = replace(plain, fault=replace(plain.fault, straggler_exclude_after=1))
    launcher = with_channel(tmp_path)
    world = Recovering(of_run, rank=1, local_ranks=1, times=SLOW_SECOND, launcher=launcher)
    world.train()
    assert world.asked
    assert to_leave_out(launcher) is None
    os.close(launcher.channel)


def test_a_step_that_is_skipped_counts_and_nothing_of_it_runs() -> None:
    world = World(config(steps=6), skipped=(3,), losses={2: 7.0})
    world.train()
    assert (world.launched, world.of(Step), world.of(StepSkipped)) == ([1, 2, 4, 5, 6], [1, 2, 4, 5, 6], [3])
    assert [event.positions for event in world.events if isinstance(event, StepSkipped)] == [(8, 12)]
    rates = {event.step: event.lr for event in world.events if isinstance(event, Step)}
    undisturbed = World(config(steps=6))
    undisturbed.train()
    assert rates == {event.step: event.lr for event in undisturbed.events if isinstance(event, Step) and event.step != 3}


@pytest.mark.parametrize("save_every", [0, 3])
@pytest.mark.parametrize("eval_every", [0, 3])
@pytest.mark.parametrize("skipped", [(3,), (1, 2), (6,), (1, 2, 3, 4, 5, 6), (2, 3, 5)])
def test_what_is_due_after_a_skipped_step_is_done_and_the_last_one_is_saved(
    skipped: tuple[int, ...], eval_every: int, save_every: int, limited: list[float]
) -> None:
    world = World(config(steps=6, save_every=save_every, eval_every=eval_every), skipped=skipped)
    world.train()
    assert world.of(Step) == [step for step in range(1, 7) if step not in skipped]
    assert world.evaluated == ([3, 6] if eval_every else [])
    assert world.saved[-1] == (6, "end")
    later = next((step for step in range(3, 6) if step not in skipped), None)
    assert [step for step, _ in world.saved[:-1]] == ([later] if save_every and later else [])
    assert len(limited) == (len(skipped) < 6)


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_a_stop_that_is_agreed_before_a_skipped_step_is_obeyed(stop_at: int) -> None:
    world = World(config(steps=20), skipped=(3, 5), stop_at=stop_at + (stop_at == 3))
    with pytest.raises(StopRequestedError):
        world.train()
    (saved,) = world.saved
    assert saved[1] == "stop"
    assert saved[0] <= stop_at + 4


@pytest.mark.parametrize(("losses", "save_s"), [(0, 0.5), (0, 30.0), (40, 30.0)])
def test_saves_come_as_often_as_their_cost_and_the_losses_call_for(losses: int, save_s: float) -> None:
    counts = FailureCounts(losses, 7, 36_000.0)
    world = World(config(steps=1000, save_every="auto"), failures=counts, save_s=save_s, step_s=9.0)
    world.train()
    changes = [event for event in world.events if isinstance(event, SaveIntervalChosen)]
    assert (changes[-1].losses, changes[-1].kept, changes[-1].save_s) == (losses, 7, save_s)
    steps = [step for step, reason in world.saved if reason == "time"]
    gaps = [after - before for before, after in pairwise(steps)]
    # A save that is asked for comes two steps later; its own duration is part of the time that has passed.
    assert 9 * gaps[-1] == pytest.approx(changes[-1].seconds - save_s, abs=4 * 9 + 0.1 * changes[-1].seconds)
    assert world.trained[-1].trained_s > 36_000.0 + 6000
    assert world.saved[-1] == (1000, "end")


def test_only_rank_0_decides_when_to_save() -> None:
    world = World(config(steps=500, save_every="auto"), rank=1)
    world.train()
    assert world.saved == [(500, "end")]
