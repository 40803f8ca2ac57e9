"""What has become of the steps of one incarnation on one host. Pure."""

from elastictrain.checkpoint.keeper.messages import Message

_TOLD_AGAIN = 8
"""Steps whose outcome is told to a worker that comes again."""


class Outcomes:
    """Which steps are in work or done, and what the workers were told of them."""

    def __init__(self) -> None:
        self._handed_over: set[int] = set()
        self._done_here: set[int] = set()
        self._told: dict[int, Message] = {}

    def clear(self) -> None:
        """Another incarnation has begun."""
        self._handed_over.clear()
        self._done_here.clear()
        self._told.clear()

    def announced(self, step: int) -> None:
        """A step is to be saved, maybe once more: the attempt that this host has done its part of may have failed elsewhere."""
        self._told.pop(step, None)
        if step in self._done_here:
            self._done_here.discard(step)
            self._handed_over.discard(step)

    def handed_over(self, step: int) -> None:
        """It is being saved."""
        self._handed_over.add(step)

    def is_handed_over(self, step: int) -> bool:
        """Whether it is being saved, or was."""
        return step in self._handed_over

    def done_here(self, step: int) -> None:
        """This host has done its part of it, and hears no more."""
        self._done_here.add(step)

    def failed(self, step: int) -> None:
        """It may come again: the last save of a run cannot wait for a later step."""
        self._handed_over.discard(step)

    def told(self, step: int, message: Message) -> None:
        """The workers that are connected have been told what became of it."""
        self._told[step] = message
        for old in sorted(self._told)[:-_TOLD_AGAIN]:
            del self._told[old]

    @property
    def to_tell_again(self) -> tuple[Message, ...]:
        """What a worker may have missed that was not connected."""
        return tuple(self._told.values())
