"""The losses of a run's evaluations, in `evaluations.json` of its folder: which checkpoints are best, and how long none was
better. Free of torch."""

import logging
import math
from dataclasses import dataclass

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.checkpoint.manifest import Count
from elastictrain.errors import ObjectNotFoundError
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.store import ReadableStore

logger = logging.getLogger(__name__)

EVALUATIONS_NAME = "evaluations.json"
MOST_WITHOUT_GAIN = 1000  # evaluations: older ones are forgotten, but for the best
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EvaluationLosses:
    """In the order of steps; a loss that is not finite is None."""

    losses: tuple[tuple[Count, float | None], ...] = ()
    best: tuple[Count, ...] = ()  # steps whose checkpoints are kept, the best first

    def add(self, step: int, loss: float, *, keep_best: int) -> "EvaluationLosses":
        """With the evaluation after `step`, which is later than all others."""
        return _rank((*self.losses, (step, loss if math.isfinite(loss) else None)), keep_best=keep_best)

    def until(self, step: int, *, keep_best: int) -> "EvaluationLosses":
        """As they were after `step`: a run that resumes from there evaluates later steps again."""
        return _rank(tuple(one for one in self.losses if one[0] <= step), keep_best=keep_best)

    @property
    def without_gain(self) -> int:
        """Evaluations since the best one; all, if none was finite."""
        finite = [loss for _, loss in self.losses if loss is not None]
        steps = [loss for _, loss in self.losses]
        return len(steps) - 1 - steps.index(min(finite)) if finite else len(steps)

    def encode(self) -> bytes:
        return encode_record(self)


def _rank(losses: tuple[tuple[int, float | None], ...], *, keep_best: int) -> EvaluationLosses:
    # The earlier one of two equal losses.
    ranked = sorted((loss, step) for step, loss in losses if loss is not None)
    best = {step for _, step in ranked[: max(1, keep_best)]}
    newest = {step for step, _ in losses[-MOST_WITHOUT_GAIN:]}
    return EvaluationLosses(
        tuple(one for one in losses if one[0] in best | newest), tuple(step for _, step in ranked[:keep_best])
    )


def read_evaluations(run: ReadableStore) -> EvaluationLosses:
    """Those of the run in `run`; none if there is no such file, or a garbled one. Raises: StorageError."""
    try:
        return parse_record(read_bounded(run, EVALUATIONS_NAME, max_bytes=_MOST_BYTES), EvaluationLosses)
    except ObjectNotFoundError:
        return EvaluationLosses()
    except ValueError as error:
        logger.warning("%s/%s is not used: it %s", run.url, EVALUATIONS_NAME, error)
        return EvaluationLosses()
