"""A loop of a user's in one generation, as far as its end is reported."""

from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.own_loop.state import OwnState
from elastictrain.train.attachment import Attachment
from elastictrain.train.observing import Observer
from elastictrain.train.saving import Reached


@dataclass(frozen=True, slots=True)
class LoopEnd:
    state: OwnState
    observer: Observer
    attachment: Callable[[], Attachment | None]

    @property
    def reached(self) -> Reached:
        if (attachment := self.attachment()) is not None:
            return attachment.reached
        return Reached(self.state.step, "storage" if self.state.step else "nothing")

    def close(self, *, finished: bool) -> None:
        if (attachment := self.attachment()) is not None:
            attachment.saving.close(finished=finished)
        self.abandon()

    def abandon(self) -> None:
        self.observer.close()
