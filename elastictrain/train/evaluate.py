"""The loss on held-out samples: the same samples each time, on any world."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastictrain.data.assignment import Share
from elastictrain.data.samples import SampleReader, derive_seed
from elastictrain.distributed.wrapping import Wrapped, reshard_parameters
from elastictrain.liveness.progress import Phase
from elastictrain.train.context import TrainContext
from elastictrain.train.loss import compute_loss
from elastictrain.train.parameters import seed_everything
from elastictrain.train.step import LossSums, metric_means, to_device
from elastictrain.train.task import ShowsSample


@dataclass(frozen=True, slots=True)
class Evaluation:
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the first samples of a held-out dataset, spread over the ranks like the global batch of a step."""

    context: TrainContext
    wrapped: Wrapped
    reader: SampleReader
    check_names: Callable[[str, tuple[str, ...]], None] = lambda *_: None  # `MetricNames.check`

    @property
    def num_samples(self) -> int:
        return min(self.context.config.train.eval_samples, len(self.reader))

    @torch.no_grad()
    def run(self, step: int, *, leave: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """The mean loss and metrics after step `step`; None if `leave`, which answers alike on all ranks, stopped it.
        Collective: yes."""
        module, device, identity = self.wrapped.module, self.context.group.device, self.context.identity
        micro_batch = self.context.config.train.micro_batch
        portions = Share(self.num_samples, micro_batch, identity.world_size, identity.rank).portions(0)
        sums = LossSums(torch.zeros(2, dtype=torch.float64, device=device))
        self.wrapped.float8.renew()
        module.eval()
        try:
            for index, portion in enumerate(portions):
                if leave():
                    return None
                self.context.tracker.set_phase(Phase.EVAL, step=step, micro_batch=index)
                batch = to_device(self.reader.read(range(portion.first, portion.end), first=portion.first), device)
                seed_everything(derive_seed(self.context.config.run.seed, "evaluation", portion.first))
                with self.wrapped.precision_context():
                    output = compute_loss(self.context.task.loss, module, batch, first=portion.first)
                sums.add(output, counts=float(portion.counts))
        finally:
            module.train()
            reshard_parameters(module)
        figures = sums.all()
        self.check_names("`loss` in an evaluation", sums.names)
        dist.all_reduce(figures)
        loss_sum, weight = figures[:2].tolist()
        loss = float("nan") if weight == 0 else loss_sum / weight
        return Evaluation(loss, metric_means(sums.names, figures[2:]))


def show_sample(context: TrainContext, wrapped: Wrapped, *, print_line: Callable[[str], None]) -> None:
    """Let the task show what the model has learnt, if it can. A failure is shown, not raised. Collective: yes."""
    if not isinstance(context.task, ShowsSample):
        return
    try:
        wrapped.float8.renew()
        with wrapped.precision_context():
            text = context.task.show_sample(wrapped.module, device=context.group.device, seed=context.config.run.seed)
    except Exception as error:  # noqa: BLE001  # the run is complete and saved: a text is not worth its exit code
        text = f"the task could not show a sample: {type(error).__name__}: {error}"
    print_line(text)
