"""The newest step from which a start would resume, as one launcher knows it: with it failures without progress are told."""

from collections.abc import Iterable
from dataclasses import dataclass

from elastictrain.identity import PoisonedSteps


@dataclass(slots=True)
class KnownStep:
    """It decreases only where the run goes back, so that steps count again when they are repeated."""

    step: int = 0
    _surpassed: int = 0  # notes and memory may still tell this step or an older one, which the run has gone back from
    _generation: int = 0  # in which it went back

    def join(self, poisoned: PoisonedSteps) -> None:
        """Take part in a generation, which may be the first after the run went back."""
        if poisoned.before_step and poisoned.generation > self._generation:
            self._surpassed = max(self._surpassed, self.step)
            self.step, self._generation = 0, poisoned.generation

    def note(self, *, restored: int, saved: Iterable[int]) -> None:
        """`restored`: by a generation that has ended; 0 if unknown. `saved`: newest steps in storage and in memory."""
        self.step = max(self.step, restored, *(one for one in saved if one > self._surpassed), 0)
