"""One optimizer step without synchronization with the device: micro-batches, one reduction, one update; and what follows it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.config.composed import RunConfig
from elastictrain.data.dataset import Batch, map_tensors
from elastictrain.data.loader import MicroBatch
from elastictrain.data.samples import derive_seed
from elastictrain.distributed.wrapping import Wrapped, accumulation
from elastictrain.errors import ConfigError
from elastictrain.liveness.progress import Phase
from elastictrain.torch_private import after_backward
from elastictrain.train.context import TrainContext
from elastictrain.train.loss import compute_loss
from elastictrain.train.optimizer import Optimizers
from elastictrain.train.parameters import local, seed_everything
from elastictrain.train.replica_comparison import HostCopy
from elastictrain.train.step_times import WAIT, StepTimes
from elastictrain.train.straggler import BETWEEN, FIGURES
from elastictrain.train.task import LossOutput, UpdatesInTurn
from elastictrain.train.weight_average import WeightAverage

# The vector that ranks sum once per step. It includes the flags, so that agreeing on a stop costs no further collective, and
# at its end a row of times for each rank, in which the other ranks have zeros.
_LOSS_SUM, _WEIGHT, _GRAD_SQUARES, _FLAGS = range(4)

_GATHERS_EVERY = 4  # steps: the marks around all waits of FSDP's forward pass cost more than others


@dataclass(frozen=True, slots=True)
class StepFlags:
    """A rank's requests and the status of its saves in a step; summed over all ranks, the flags of any rank."""

    stop: bool = False
    save: bool = False  # a save is due by the clock of rank 0
    unsaved: bool = False  # a save is under way to storage; only rank 0 sets it
    unusable: bool = False  # the rank can take no snapshots
    sending: bool = False  # its host still sends replicas
    unsent: bool = False  # replicas of its host did not arrive
    failed_saves: int = 0  # failed saves in a row; only rank 0 sets it
    snapshot_interval: int = 0  # steps between snapshots, where it is learned; only rank 0 sets it
    busy: tuple[bool, ...] = ()  # by slot for snapshots: it cannot be written now
    torn: tuple[bool, ...] = ()  # by slot: its snapshot is not whole

    def encode(self) -> list[float]:
        """Numbers that ranks can sum, in the order of the fields; equally many on all ranks."""
        *flags, busy, torn = (getattr(self, one.name) for one in fields(self))
        return [*map(float, flags), *busy, *torn]

    @classmethod
    def decode(cls, sums: Sequence[float]) -> Self:
        """From the sums of all ranks' `encode`: a flag is set if any rank's is; numbers are those of rank 0 alone."""
        stop, save, unsaved, unusable, sending, unsent, failed_saves, snapshot_interval, *slots = sums
        place = len(slots) // 2
        return cls(
            stop=stop > 0,
            save=save > 0,
            unsaved=unsaved > 0,
            unusable=unusable > 0,
            sending=sending > 0,
            unsent=unsent > 0,
            failed_saves=int(failed_saves),
            snapshot_interval=int(snapshot_interval),
            busy=tuple(one > 0 for one in slots[:place]),
            torn=tuple(one > 0 for one in slots[place:]),
        )


@dataclass(slots=True)
class LossSums:
    """Sums over micro-batches: `figures` begins with those of loss and weight, and metrics with their weights follow it."""

    figures: Tensor  # float64
    names: tuple[str, ...] = ()  # of the metrics, the same on all ranks, in this order
    _sums: list[Tensor] = field(default_factory=list)  # a micro-batch's: [2 * metrics] float64

    def add(self, output: LossOutput, *, counts: float) -> None:
        """`counts`: 0 for a micro-batch that other ranks count. Raises: ConfigError for other names than before."""
        self.figures[_LOSS_SUM] += output.loss_sum.detach() * counts
        self.figures[_WEIGHT] += output.weight * counts
        names = tuple(sorted(output.metrics))
        if self._sums and names != self.names:
            first, now = (", ".join(one) or "none" for one in (self.names, names))
            raise ConfigError(
                f"the task's `loss` must return the same metrics for each micro-batch, but now {now} after {first}"
            )
        self.names = names
        values = [output.metrics[name] for name in names]
        pairs = [one if isinstance(one, tuple) else (one, output.weight) for one in values]
        device = output.loss_sum.device
        flat = [torch.as_tensor(value, device=device).detach().double() for pair in pairs for value in pair]
        self._sums.append(torch.stack(flat) * counts if flat else torch.empty(0, dtype=torch.float64))

    def all(self) -> Tensor:
        """`figures`, and the sums of metrics behind them."""
        return torch.cat((self.figures, torch.stack(self._sums).sum(dim=0))) if self.names else self.figures


def metric_means(names: Sequence[str], sums: Tensor) -> dict[str, float]:
    """The mean of each metric from `sums`, as `LossSums` has them."""
    pairs = sums.view(-1, 2).tolist()
    return {name: value / weight if weight else float("nan") for name, (value, weight) in zip(names, pairs, strict=True)}


@dataclass(frozen=True, slots=True)
class StepResult:
    """The figures of a step, the same on every rank."""

    step: int
    rate: float
    loss: float
    grad_norm: float
    flags: StepFlags
    times: Tensor | None = None  # [ranks, FIGURES] float64, of an earlier step; None if they are not measured
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose figures are being copied from the device; `result` waits for that copy alone."""

    step: int
    rate: float
    figures: HostCopy
    num_times: int = 0
    metrics: tuple[str, ...] = ()  # whose sums and weights are the last figures

    def result(self) -> StepResult:
        content = self.figures.wait()
        end = len(content) - 2 * len(self.metrics)
        place = end - self.num_times
        loss, grad_norm, *sums = content[:place].tolist()
        times = content[place:end].clone().view(-1, FIGURES) if self.num_times else None
        metrics = metric_means(self.metrics, content[end:])
        return StepResult(self.step, self.rate, loss, grad_norm, StepFlags.decode(sums), times, metrics)


@dataclass(frozen=True, slots=True)
class Stepper:
    """Executes optimizer steps. The backward passes accumulate gradients of the loss *sum*; its divisor, the weight of the
    whole global batch, is known only when every rank has finished. Dividing, clipping and leaving out a non-finite update are
    then one factor and one flag, computed on the device and applied by the optimizer as it reads the gradients."""

    context: TrainContext
    wrapped: Wrapped
    optimizer: Optimizers
    before_update: Callable[[], None] = lambda: None  # called when all work of a step but the update is launched
    times: StepTimes[Any] | None = None
    average: WeightAverage | None = None
    check_names: Callable[[str, tuple[str, ...]], None] = lambda *_: None  # `MetricNames.check`

    def run(
        self,
        step: int,
        micro_batches: Iterator[MicroBatch],
        *,
        passes: int,
        rate: float,
        flags: Callable[[], StepFlags] = StepFlags,
    ) -> PendingStep:
        """Run `passes` micro-batches and launch the update of step `step` (from 1). `flags` is called when they are launched: a
        device may be a step behind until then, and a snapshot that is whole in time makes room for the next one a step
        earlier. Collective: yes."""
        device = self.context.group.device
        rows = self._begin_times(self.times) if self.times is not None else torch.empty(0, dtype=torch.float64)

        def rest() -> Tensor:
            told = torch.tensor(flags().encode(), dtype=torch.float64)
            return torch.cat((told, rows)).to(device, non_blocking=True)

        task, turn = self.context.task, None
        batches: Iterable[MicroBatch] = self._fetch(step, micro_batches, passes=passes)
        if isinstance(task, UpdatesInTurn):
            batches = list(batches)
            updates = [_Update(name, partial(task.update_loss, name)) for name in task.updates]
        else:
            updates = [_Update("", task.loss)]
        for update in updates:
            turn = self._turn(step, batches, rest, passes=passes, rate=rate, update=update, before=turn)
        assert turn is not None  # noqa: S101  # `make_optimizers` refuses a task without updates
        if self.average is not None:
            self.average.update(finite=turn.finite)
        pending = PendingStep(step, rate, HostCopy(torch.cat(turn.told)), len(rows), turn.metrics)
        if self.times is not None:
            self.times.mark(BETWEEN)
        return pending

    def _fetch(self, step: int, micro_batches: Iterator[MicroBatch], *, passes: int) -> Iterator[MicroBatch]:
        for index in range(passes):
            self._set_phase(Phase.DATA, step, index)
            yield next(micro_batches)

    def _turn(
        self,
        step: int,
        micro_batches: Iterable[MicroBatch],
        rest: Callable[[], Tensor],
        *,
        passes: int,
        rate: float,
        update: "_Update",
        before: "_Turn | None",
    ) -> "_Turn":
        """All passes of one update, its reduction, and the update unless it, or one before it in this step, is not finite.
        `rest`: what is reduced with the first one's figures."""
        figures = torch.zeros(_FLAGS, dtype=torch.float64, device=self.context.group.device)
        sums, statistics = LossSums(figures), self.wrapped.statistics.copy()
        self.wrapped.float8.renew()
        for index, micro_batch in enumerate(micro_batches):
            last = index == passes - 1
            with accumulation(self.wrapped.module, last=last):
                self._pass(step, index, micro_batch, sums, update=update, last=last)
        if before is None:
            sums.figures = torch.cat((figures, rest()))
        end, figures = len(sums.figures), sums.all()
        self._set_phase(Phase.REDUCE, step, works=False)
        self.check_names(f"`update_loss` of {update.name!r}" if update.name else "`loss`", sums.names)
        groups = self.optimizer.param_groups
        if update.name:
            drop_gradients(self.wrapped.bare, [group for group in groups if group["update"] == update.name])
        parameters = (parameter for group in groups for parameter in group["params"])
        if gradients := [local(parameter.grad) for parameter in parameters if parameter.grad is not None]:
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
            # Each shard exists this many times in the group, so that the sum over ranks counts its squares as often.
            figures[_GRAD_SQUARES] = norm.double().square() / self.wrapped.shape.replicas
        dist.all_reduce(figures)
        self.wrapped.statistics.average(statistics)
        self._set_phase(Phase.UPDATE, step)
        self.before_update()
        mean, norm, finite = self._update(figures, rate, finite=before.finite if before is not None else None)
        if not update.name:
            return _Turn(finite, (torch.stack((mean, norm)), figures[_FLAGS:]), sums.names)
        names = (*(f"{update.name}_{name}" for name in sums.names), f"{update.name}_loss")
        told = (figures[end:], figures[: _WEIGHT + 1])
        if before is None:
            return _Turn(finite, (torch.stack((mean, norm)), figures[_FLAGS:end], *told), names)
        total, norm_before = before.told[0]
        both = torch.stack((total + mean, torch.hypot(norm_before, norm)))
        return _Turn(finite, (both, *before.told[1:], *told), (*before.metrics, *names))

    def _begin_times(self, times: StepTimes[Any]) -> Tensor:
        """The rows of times of all ranks, of which this one fills its own."""
        identity = self.context.identity
        rows = torch.zeros(identity.world_size, FIGURES, dtype=torch.float64)
        rows[identity.rank] = torch.tensor(times.begin(), dtype=torch.float64)
        return rows.view(-1)

    def _set_phase(self, phase: Phase, step: int, index: int = 0, *, works: bool = True) -> None:
        """`works`: whether the phase is this rank's own work, as far as can be told."""
        self.context.tracker.set_phase(phase, step=step, micro_batch=index)
        if self.times is not None:
            self.times.mark(str(phase) if works else WAIT)

    def _pass(self, step: int, index: int, micro_batch: MicroBatch, sums: LossSums, *, update: "_Update", last: bool) -> None:
        device, seed, sharded = self.context.group.device, self.context.config.run.seed, self.wrapped.shape.shards > 1
        gathers, times = self.wrapped.gathers, self.times
        sampled = sharded and index == 0 and step % _GATHERS_EVERY == 0
        self._set_phase(Phase.FORWARD, step, index, works=sampled or not sharded)
        if sampled and times is not None:
            gathers.mark = lambda begins: times.mark(WAIT if begins else str(Phase.FORWARD))
        seed_everything(derive_seed(seed, "micro-batch", step, micro_batch.portion.first, *filter(None, [update.name])))
        try:
            with self.wrapped.precision_context():
                batch = to_device(micro_batch.batch, device)
                output = compute_loss(update.loss, self.wrapped.module, batch, first=micro_batch.portion.first)
        finally:
            # A recovery in place keeps the module: later passes would mark the times of a generation that is over.
            gathers.mark = None
        sums.add(output, counts=float(micro_batch.portion.counts))
        self._set_phase(Phase.BACKWARD, step, index, works=not sharded)
        # A pass that does not count still runs its backward: its collectives need every rank.
        loss_sum = output.loss_sum if micro_batch.portion.counts else output.loss_sum * 0.0
        if last and not sharded and times is not None:
            # Before DDP begins to wait for the other ranks' gradients.
            after_backward(loss_sum, partial(times.mark, WAIT))
        loss_sum.backward()  # type: ignore[no-untyped-call]

    def _update(self, figures: Tensor, rate: float, *, finite: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the update; returns the mean loss, the norm of its gradient, and whether the update is made. `finite`:
        whether those before it in this step are."""
        weight = figures[_WEIGHT]
        loss = figures[_LOSS_SUM] / weight
        # .grad times this is the gradient of the mean loss.
        to_mean = self.wrapped.shape.world_size / weight
        norm = figures[_GRAD_SQUARES].sqrt() * to_mean
        clip_norm = self.context.config.train.clip_norm
        clip = (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm > 0 else torch.ones_like(norm)
        good = torch.isfinite(loss) & torch.isfinite(norm)
        good = good if finite is None else good & finite
        self.optimizer.update(rate=rate, scale=to_mean * clip, finite=good)
        return loss, norm, good


@dataclass(frozen=True, slots=True)
class _Update:
    name: str  # empty where a step has only one
    loss: Callable[[nn.Module, Batch], LossOutput]


@dataclass(frozen=True, slots=True)
class _Turn:
    """The updates of a step up to one of them."""

    finite: Tensor  # whether all were made: [] bool
    told: tuple[Tensor, ...]  # for the host: the loss and the norm [2], then flags, times and metrics
    metrics: tuple[str, ...]


def drop_gradients(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Of all parameters that are not in `groups`."""
    kept = {parameter for group in groups for parameter in group["params"]}
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.grad = None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The micro-batch on the device; asynchronous from pinned memory."""
    if device.type == "cpu":
        return batch
    moved: Batch = map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
    return moved


SaveReason = Literal["interval", "time", "stop", "end"]


@dataclass(frozen=True, slots=True)
class StepActions:
    save: SaveReason | None
    evaluate: bool
    leave: bool


def after_step(step: int, config: RunConfig, *, stop_agreed: bool, save_agreed: bool) -> StepActions:
    """What follows step `step`. The agreed flags come from a reduction, so they are the same on every rank."""
    save_every, eval_every = config.checkpoint.every_steps, config.train.eval_every_steps
    if save_every == "auto":
        # The clock of rank 0 asks for these saves.
        save_every = 0
    end = step >= config.train.steps
    reason: SaveReason | None = None
    if end:
        reason = "end"
    elif stop_agreed:
        reason = "stop"
    elif save_every and step % save_every == 0:
        reason = "interval"
    elif save_agreed:
        reason = "time"
    evaluate = eval_every > 0 and (end or (step % eval_every == 0 and not stop_agreed))
    return StepActions(reason, evaluate, leave=end or stop_agreed)
