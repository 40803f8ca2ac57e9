"""The evaluations of a run so far, on all ranks alike: which checkpoints are kept as the best, and when training ends early."""

import logging
from dataclasses import dataclass
from typing import Self

from elastictrain.bounded_json import parse_record
from elastictrain.checkpoint.evaluations import EVALUATIONS_NAME, EvaluationLosses, read_evaluations
from elastictrain.checkpoint.exchange import from_first
from elastictrain.errors import StorageError
from elastictrain.train.context import TrainContext

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EvaluationHistory:
    context: TrainContext
    evaluations: EvaluationLosses

    @classmethod
    def resume(cls, context: TrainContext, *, step: int) -> Self | None:
        """What is known after `step`; None if no key asks for it. Collective: yes. Raises: StorageError."""
        keep_best = context.config.checkpoint.keep_best
        if not keep_best and not context.config.train.stop_after_evals_without_gain:
            return None

        def read() -> bytes:
            return read_evaluations(context.store).until(step, keep_best=keep_best).encode()

        return cls(context, parse_record(from_first(read, group=context.group.control), EvaluationLosses))

    def __contains__(self, step: int) -> bool:
        return any(one == step for one, _ in self.evaluations.losses)

    @property
    def ended(self) -> bool:
        """Whether training is over since no evaluation was better for so long."""
        patience = self.context.config.train.stop_after_evals_without_gain
        return 0 < patience <= self.evaluations.without_gain

    def add(self, step: int, loss: float) -> None:
        """Note the evaluation after `step`, and store it as rank 0: before a later checkpoint can supersede that of `step`."""
        if step in self:
            return
        self.evaluations = self.evaluations.add(step, loss, keep_best=self.context.config.checkpoint.keep_best)
        if self.context.identity.rank == 0:
            try:
                self.context.store.write(EVALUATIONS_NAME, self.evaluations.encode())
            except StorageError as error:
                logger.warning("the evaluation after step %d is not noted for later starts: %s", step, error)
