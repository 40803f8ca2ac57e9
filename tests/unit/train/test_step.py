import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.config.optim import OptimGroup
from elastictrain.data.assignment import Share
from elastictrain.data.dataset import Batch
from elastictrain.data.loader import MicroBatch
from elastictrain.distributed.clock import HostClock
from elastictrain.errors import ConfigError
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.state import TrainState
from elastictrain.train.step import StepFlags, Stepper, StepResult
from elastictrain.train.step_times import LATE, StepTimes
from elastictrain.train.straggler import FIGURES, PHASES
from elastictrain.train.task import LossOutput
from tests.unit.train.parts import GLOBAL_BATCH, Points, Squares, context_of, micro_batches, wrapped_model
from tests.unit.train.test_loop import config

OPTIONS = OptimGroup(lr=0.05, weight_decay=0.2, beta1=0.8, beta2=0.9)
RATES = (0.05, 0.03, 0.01)
POINTS = Points()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Bench:
    """A stepper of a world of one, with its state."""

    def __init__(self, task: Squares | None = None, *, kind: str = "ddp", clip_norm: float = 0.0, seed: int = 1) -> None:
        task = task or Squares()
        self.wrapped = wrapped_model(task, kind=kind)
        self.optimizer = make_optimizers(self.wrapped.bare, OPTIONS)
        self.state = TrainState(self.wrapped.bare, self.optimizer)
        self.tracker = ProgressTracker()
        plain = config(steps=1)
        of_run = replace(plain, train=replace(plain.train, clip_norm=clip_norm), run=replace(plain.run, seed=seed))
        context = context_of(config=of_run, task=task, tracker=self.tracker)
        self.stepper = Stepper(context, self.wrapped, self.optimizer)

    def step(
        self,
        step: int,
        sizes: Sequence[int] = (GLOBAL_BATCH,),
        *,
        rate: float = 0.05,
        idle: Sequence[int] = (),
        flags: StepFlags | None = None,
    ) -> StepResult:
        source = micro_batches(POINTS, step, sizes, idle=idle)
        passes = len(sizes) + len(idle)
        return self.stepper.run(step, source, passes=passes, rate=rate, flags=lambda: flags or StepFlags()).result()

    def snapshot(self) -> dict[str, Tensor]:
        return {name: full(tensor).detach().clone() for name, tensor in self.state.tensors().items()}


def by_hand(clip_norm: float, dropout: float = 0.0) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """The shortest loop that does the same: mean over the global batch, clip_grad_norm_, AdamW."""
    model = wrapped_model(Squares(dropout)).bare
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        eps=OPTIONS.eps,
        foreach=False,
    )
    figures = []
    for step, rate in enumerate(RATES, start=1):
        batch = POINTS.batch((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)
        output = Squares().loss(model, batch)
        loss = output.loss_sum / output.weight
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        figures.append((loss.item(), norm.item()))
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}, figures


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.1, 1000.0])
@pytest.mark.parametrize("sizes", [(8,), (4, 4), (3, 3, 2), (1,) * 8], ids=str)
def test_a_step_is_that_of_the_shortest_loop_by_hand(
    group_of_one: dist.HashStore, kind: str, clip_norm: float, sizes: tuple[int, ...]
) -> None:
    bench = Bench(kind=kind, clip_norm=clip_norm)
    expected, figures = by_hand(clip_norm)
    for step, (rate, (loss, norm)) in enumerate(zip(RATES, figures, strict=True), start=1):
        result = bench.step(step, sizes, rate=rate)
        assert (result.step, result.rate) == (step, rate)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    tensors = bench.snapshot()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert all(value.item() == len(RATES) for name, value in tensors.items() if name.startswith("optim.step."))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("idle", [(2,), (0, 1), (1, 3)], ids=str)
def test_passes_that_do_not_count_change_nothing(group_of_one: dist.HashStore, kind: str, idle: tuple[int, ...]) -> None:
    plain, short = Bench(kind=kind, clip_norm=0.1), Bench(kind=kind, clip_norm=0.1)
    for step in (1, 2):
        result = short.step(step, (4, 4), idle=idle)
        assert result == plain.step(step, (4, 4))
    expected = plain.snapshot()
    for name, value in short.snapshot().items():
        assert torch.equal(value, expected[name]), name


class Poisoned(Squares):
    """Finite until told otherwise: `loss` or only the gradient becomes infinite or not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.poison = "none"

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        output = super().loss(model, batch)
        match self.poison:
            case "loss nan":
                return LossOutput(output.loss_sum * math.nan, output.weight)
            case "loss inf":
                return LossOutput(output.loss_sum + math.inf, output.weight)
            case "gradient":
                # The root of zero is zero, and its slope is infinite.
                return LossOutput(output.loss_sum + (next(model.parameters()) * 0.0).sum().abs().sqrt(), output.weight)
            case "weight":
                return LossOutput(output.loss_sum * 0.0, output.weight * 0.0)
        return output


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("poison", ["loss nan", "loss inf", "gradient", "weight"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_a_step_that_is_not_finite_leaves_everything_untouched_bit_for_bit(
    group_of_one: dist.HashStore, kind: str, poison: str, clip_norm: float
) -> None:
    task = Poisoned()
    bench = Bench(task, kind=kind, clip_norm=clip_norm)
    bench.step(1, (4, 4))
    before = bench.snapshot()
    task.poison = poison
    result = bench.step(2, (4, 4), rate=0.5)
    assert not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
    after = bench.snapshot()
    assert set(after) == set(before)
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in bench.wrapped.bare.parameters())

    task.poison = "none"
    result = bench.step(3, (4, 4))
    assert math.isfinite(result.loss)
    steps = {name: value.item() for name, value in bench.snapshot().items() if name.startswith("optim.step.")}
    assert set(steps.values()) == {2.0}


def test_what_is_not_finite_in_one_micro_batch_spoils_the_whole_step(group_of_one: dist.HashStore) -> None:
    bench = Bench()
    before = bench.snapshot()
    good, bad = micro_batches(POINTS, 1, (4, 4))
    bad = MicroBatch(bad.step, bad.portion, bad.sample_ids, {**bad.batch, "x": torch.full((4, 3), math.inf)})
    result = bench.stepper.run(1, iter((bad, good)), passes=2, rate=0.1).result()
    assert math.isnan(result.loss)
    for name, value in bench.snapshot().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_same_step_gives_the_same_bits_whatever_was_drawn_before(group_of_one: dist.HashStore, kind: str) -> None:
    snapshots = []
    for noise in (0, 1):
        bench = Bench(Squares(dropout=0.5), kind=kind)
        torch.manual_seed(noise)
        bench.step(1, (4, 4))
        torch.rand(noise * 7)
        bench.step(2, (4, 4))
        snapshots.append(bench.snapshot())
    for name, value in snapshots[0].items():
        assert torch.equal(value, snapshots[1][name]), name


def test_randomness_belongs_to_the_positions_and_not_to_the_pass(group_of_one: dist.HashStore) -> None:
    losses = []
    for turn in (1, -1):
        batches = list(micro_batches(POINTS, 1, (4, 4)))[::turn]
        bench = Bench(Squares(dropout=0.5))
        losses.append(bench.stepper.run(1, iter(batches), passes=2, rate=0.1).result().loss)
    assert losses[0] == losses[1]


def test_only_the_last_pass_reduces_gradients(group_of_one: dist.HashStore) -> None:
    bench, reduced = Bench(kind="fsdp"), []
    shards = [parameter for group in bench.optimizer.param_groups for parameter in group["params"]]

    class Noting(Squares):
        def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
            reduced.append(any(shard.grad is not None for shard in shards))
            return super().loss(model, batch)

    bench.stepper.context.task = Noting()
    bench.step(1, (2, 2, 2, 2))
    bench.step(2, (2, 2, 2, 2))
    assert reduced == [False] * 8
    assert bench.step(3).grad_norm > 0


class Masked(Squares):
    """Notes the dropout mask of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[tuple[bool, ...]] = []

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        self.masks.append(tuple((nn.functional.dropout(torch.ones(64), 0.5) > 0).tolist()))
        return super().loss(model, batch)


def masks_of(world_size: int) -> dict[tuple[int, int], tuple[bool, ...]]:
    """The mask at each step (from 1) and first position, over all ranks of a world; each is met once."""
    found: dict[tuple[int, int], tuple[bool, ...]] = {}
    for rank in range(world_size):
        task = Masked()
        bench = Bench(task)
        for step in (1, 2):
            portions = Share(GLOBAL_BATCH, 2, world_size, rank).portions(step - 1)
            source = [
                MicroBatch(step - 1, one, tuple(range(one.first, one.end)), POINTS.batch(one.first, one.end))
                for one in portions
            ]
            bench.stepper.run(step, iter(source), passes=len(source), rate=0.1)
            for one, mask in zip(portions, task.masks[-len(portions) :], strict=True):
                assert found.setdefault((step, one.first), mask) == mask
    return found


def test_dropout_differs_between_micro_batches_and_ranks_and_not_between_worlds(group_of_one: dist.HashStore) -> None:
    alone = masks_of(1)
    assert len(alone) == 2 * GLOBAL_BATCH // 2
    assert len(set(alone.values())) == len(alone)
    for world_size in (2, 3, 4):
        assert masks_of(world_size) == alone


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 2}])
def test_randomness_follows_the_seed_and_the_step(group_of_one: dist.HashStore, other: dict[str, int]) -> None:
    losses = []
    for seed, step in ((1, 1), (other.get("seed", 1), other.get("step", 1))):
        bench = Bench(Squares(dropout=0.5), seed=seed)
        (batch,) = micro_batches(POINTS, 1, (8,))
        losses.append(bench.stepper.run(step, iter((batch,)), passes=1, rate=0.1).result().loss)
    assert losses[0] != losses[1]


def test_the_source_is_left_at_the_next_step(group_of_one: dist.HashStore) -> None:
    source = chain(micro_batches(POINTS, 1, (4, 4)), micro_batches(POINTS, 2, (4, 4)))
    Bench().stepper.run(1, source, passes=2, rate=0.1)
    assert [micro_batch.step for micro_batch in source] == [1, 1]


SAVES = StepFlags(unsaved=True, sending=True, failed_saves=3, snapshot_interval=7, busy=(True, False), torn=(False, True))


@pytest.mark.parametrize("flags", [StepFlags(), StepFlags(stop=True), StepFlags(save=True), SAVES], ids=repr)
def test_flags_ride_along(group_of_one: dist.HashStore, flags: StepFlags) -> None:
    assert Bench().step(1, flags=flags).flags == flags


def test_flags_are_those_of_the_moment_when_the_passes_are_launched(group_of_one: dist.HashStore) -> None:
    """A snapshot that has become whole meanwhile makes room for the next one."""
    batches = micro_batches(POINTS, 1, (4, 4))
    left = iter(batches)

    def flags() -> StepFlags:
        return StepFlags(save=next(left, None) is None)

    assert Bench().stepper.run(1, left, passes=2, rate=0.1, flags=flags).result().flags == StepFlags(save=True)


def test_a_flag_of_any_rank_counts() -> None:
    other = StepFlags(stop=True, unsaved=True, unusable=True, unsent=True, busy=(True, True), torn=(False, False))
    sums = [a + b for a, b in zip(SAVES.encode(), other.encode(), strict=True)]
    together = StepFlags(
        stop=True,
        unsaved=True,
        unusable=True,
        sending=True,
        unsent=True,
        failed_saves=3,
        snapshot_interval=7,
        busy=(True, True),
        torn=(False, True),
    )
    assert StepFlags.decode(sums) == together


class Phases(StepTimes[float]):
    """Keeps what was marked."""

    def __init__(self) -> None:
        super().__init__(HostClock())
        self.marked: list[str] = []

    def mark(self, phase: str = "") -> None:
        self.marked.append(phase)
        super().mark(phase)


def test_the_phases_of_a_step_are_marked_and_the_last_backward_pass_ends_with_its_own_work(
    group_of_one: dist.HashStore,
) -> None:
    bench, times = Bench(), Phases()
    bench.stepper = replace(bench.stepper, times=times)
    bench.step(1, (4, 4))
    one_pass = ["data", "forward", "backward"]
    assert times.marked == [*one_pass, *one_pass, "", "", "update", "between"]


def test_times_ride_on_the_reduction_beside_the_flags(group_of_one: dist.HashStore) -> None:
    bench, flags = Bench(), StepFlags(save=True, snapshot_interval=7, busy=(True, False), torn=(False, True))
    assert bench.step(1, flags=flags).times is None
    bench.stepper = replace(bench.stepper, times=StepTimes(HostClock()))
    results = [bench.step(step, flags=flags) for step in range(2, 4 + LATE)]
    assert all(result.flags == flags for result in results)
    told = [result.times for result in results]
    assert all(times is not None and times.shape == (1, FIGURES) for times in told)
    *early, first, _ = [times for times in told if times is not None]
    assert not any(times.any() for times in early)
    step_s, *phases_s = first[0].tolist()
    assert all(seconds > 0 for seconds in phases_s)
    assert sum(phases_s) < step_s
    assert len(phases_s) == len(PHASES)


class Broken(Squares):
    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        super().loss(model, batch)
        raise RuntimeError("a collective was aborted")


def test_a_forward_pass_that_is_cut_short_leaves_no_mark_to_later_ones(group_of_one: dist.HashStore) -> None:
    bench, times = Bench(Broken(), kind="fsdp"), Phases()
    sharded = replace(bench.wrapped, shape=replace(bench.wrapped.shape, shards=2))
    bench.stepper = replace(bench.stepper, wrapped=sharded, times=times)
    with pytest.raises(RuntimeError, match="aborted"):
        bench.step(4)
    marked = list(times.marked)
    with torch.no_grad():
        Squares().loss(bench.wrapped.module, POINTS.batch(0, 2))
    assert bench.wrapped.gathers.mark is None
    assert times.marked == marked


class Counting(Squares):
    """Tells the mean error, and the mean y of positive ones."""

    varies = False

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        output, y = super().loss(model, batch), batch["y"]
        metrics: dict[str, Tensor | tuple[Tensor, Tensor]] = {"positive": (y.clamp(min=0).sum(), (y > 0).sum())}
        if not self.varies or len(y) == 3:
            metrics["again"] = output.loss_sum
        return LossOutput(output.loss_sum, output.weight, metrics)


@pytest.mark.parametrize("idle", [(), (1,)], ids=str)
@pytest.mark.parametrize("timed", [False, True])
def test_metrics_are_means_over_the_global_batch_in_the_same_reduction(
    group_of_one: dist.HashStore, idle: tuple[int, ...], timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reductions: list[int] = []
    reduce = dist.all_reduce
    bench, plain, flags = Bench(Counting()), Bench(), StepFlags(save=True, busy=(True,), torn=(False,))
    if timed:
        bench.stepper = replace(bench.stepper, times=StepTimes(HostClock()))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: (reductions.append(len(tensor)), reduce(tensor)))
    result = bench.step(1, (3, 3, 2), idle=idle, flags=flags)
    assert len(reductions) == 1
    expected = plain.step(1, (3, 3, 2), idle=idle, flags=flags)
    y = POINTS.y[:GLOBAL_BATCH]
    assert result.metrics == pytest.approx({"again": result.loss, "positive": y[y > 0].mean().item()})
    assert (result.loss, result.grad_norm, result.flags) == (expected.loss, expected.grad_norm, expected.flags)
    assert (result.times is not None) == timed


def test_metrics_that_come_and_go_are_refused(group_of_one: dist.HashStore) -> None:
    task = Counting()
    task.varies = True
    with pytest.raises(ConfigError, match="positive after again, positive"):
        Bench(task).step(1, (3, 3, 2))
