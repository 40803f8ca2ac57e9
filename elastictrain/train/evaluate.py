"""The loss on held-out samples: the same samples each time, on any world."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from elastictrain.data.assignment import Share
from elastictrain.data.dataset import Dataset
from elastictrain.data.workers import read_batch
from elastictrain.distributed.wrapping import Wrapped, gather_no_more
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.train.step import to_device
from elastictrain.train.task import Task


class Evaluator:
    """Evaluates the first samples of a held-out dataset, spread over the ranks as a step's global batch is."""

    def __init__(
        self,
        task: Task,
        wrapped: Wrapped,
        dataset: Dataset,
        *,
        num_samples: int,
        micro_batch: int,
        identity: Identity,
        device: torch.device,
        tracker: ProgressTracker,
    ) -> None:
        self._task = task
        self._wrapped = wrapped
        self._dataset = dataset
        self.num_samples = min(num_samples, len(dataset))
        share = Share(self.num_samples, micro_batch, world_size=identity.world_size, rank=identity.rank)
        self._portions = share.portions(0)
        self._device = device
        self._tracker = tracker

    @torch.no_grad()
    def run(self, step: int, *, leave: Callable[[], bool] = lambda: False) -> float | None:
        """The mean loss after step `step`; None if `leave`, which all ranks answer alike, broke it off. Collective: yes."""
        module = self._wrapped.module
        figures = torch.zeros(2, dtype=torch.float64, device=self._device)
        module.eval()
        try:
            for index, portion in enumerate(self._portions):
                if leave():
                    return None
                self._tracker.set_phase(Phase.EVAL, step=step, micro_batch=index)
                batch = read_batch(self._dataset, range(portion.first, portion.end))
                with self._wrapped.precision_context():
                    output = self._task.loss(module, to_device(batch, self._device))
                if portion.counts:
                    figures += torch.stack((output.loss_sum, output.weight)).double()
        finally:
            module.train()
            gather_no_more(module)
        dist.all_reduce(figures)
        loss_sum, weight = figures.tolist()
        return float("nan") if weight == 0 else loss_sum / weight
