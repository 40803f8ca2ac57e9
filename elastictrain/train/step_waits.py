"""What training waited for since the last step, for the goodput ledger; measured without waiting for a device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastictrain.data.loader import MicroBatch
from elastictrain.train.step import StepResult
from elastictrain.train.straggler import PHASES, Straggler

_LEAST_S = 1e-4  # shorter waits are not recorded
_DATA = 1 + PHASES.index("data")


@dataclass(slots=True)
class StepWaits:
    """Seconds by cause. `on_device`: a device works while the host awaits batches; its own times tell how long it waited."""

    on_device: bool
    clock: Callable[[], float] = time.monotonic
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        began = self.clock()
        yield
        self._seconds[cause] += self.clock() - began

    def batches(self, loader: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches of `loader`, each timed."""
        while True:
            with self.waiting("data"):
                batch = next(loader)
            yield batch

    def take(self, result: StepResult, stragglers: Iterable[Straggler]) -> dict[str, float]:
        """What a worker waited for since the last call, on average over all workers. `stragglers`: those that are named."""
        found, self._seconds = self._seconds, defaultdict(float)
        if self.on_device:
            # Those of an earlier step: its marks have been passed.
            found["data"] = float(result.times[:, _DATA].mean()) if result.times is not None else 0.0
        if lags := [one.lag.own_s - one.lag.others_s for one in stragglers]:
            world_size = len(result.times) if result.times is not None else 1
            found["straggler"] = max(lags) * (world_size - 1) / world_size
        return {name: round(seconds, 4) for name, seconds in found.items() if seconds >= _LEAST_S}
