"""What the snapshots that a worker has announced still wait for, and what became of them. Pure; the times are handed in."""

from elastictrain.checkpoint.saver.messages import Saved, SaveFailure, SnapshotTaken


class PendingSaves:
    """The books of one worker. Not for several threads at once."""

    def __init__(self) -> None:
        self._unseen: dict[int, int] = {}
        """Steps by slot: the saver has not looked at these yet."""

        self._unreleased: set[int] = set()
        """Steps whose slots it still needs."""

        self._unsaved: dict[int, float] = {}
        """Steps that are to be durable, and since when."""

        self._in_slot: dict[int, int] = {}
        """The step that was announced last, by slot."""

        self._left_over: dict[int, str] = {}
        """Steps that a saver had written, and its successor finds in their slots unless something newer is on its way there;
        with the reason that they have failed in that case."""

        self._saved: list[Saved] = []
        self._failures: list[SaveFailure] = []

    def announce(self, slot: int, step: int, *, durable: bool, now_s: float) -> SnapshotTaken:
        """A snapshot is whole: what the saver is told of it."""
        self._unseen[slot] = step
        overwritten, self._in_slot[slot] = self._in_slot.get(slot), step
        if overwritten in self._left_over:
            self.failed(SaveFailure(overwritten, self._left_over[overwritten]))
        if durable:
            self._unreleased.add(step)
            self._unsaved[step] = now_s
        return self._announcement(slot, step)

    def announcements(self) -> list[SnapshotTaken]:
        """What a saver has to be told that was not there before."""
        return [self._announcement(slot, step) for slot, step in self._unseen.items()]

    def needs(self, slot: int, step: int) -> bool:
        """Whether the saver still has to look at a snapshot, or to write it."""
        return self._unseen.get(slot) == step or step in self._unreleased

    def seen(self, slot: int, step: int) -> None:
        """The saver has looked at a snapshot; one that came after it stays announced."""
        if self._unseen.get(slot) == step:
            del self._unseen[slot]

    def released(self, step: int, *, done: bool) -> None:
        """The saver needs the slots of a step no more. `done`: nothing else will be heard of it."""
        self._unreleased.discard(step)
        if done:
            self._unsaved.pop(step, None)

    def saved(self, saved: Saved) -> None:
        """A step is durable. Older ones are settled by that, if what became of them was said while nobody listened."""
        if saved.step in self._unsaved:
            self._saved.append(saved)
        for step in [step for step in {*self._unsaved, *self._unreleased} if step <= saved.step]:
            self._settled(step)

    def failed(self, failure: SaveFailure) -> None:
        """It will not be."""
        if failure.step in self._unsaved:
            self._settled(failure.step)
            self._failures.append(failure)

    def overdue(self, *, now_s: float, limit_s: float) -> int | None:
        """A step that should have been durable long since."""
        return next((step for step, since in self._unsaved.items() if now_s - since > limit_s), None)

    def give_up(self, reason: str) -> None:
        """Nobody will look at what is waiting."""
        self._unseen.clear()
        self._failures += [SaveFailure(step, reason) for step in sorted({*self._unreleased, *self._unsaved})]
        self._unreleased.clear()
        self._unsaved.clear()
        self._left_over.clear()

    def succeed(self, reason: str) -> None:
        """Another saver has come: what was written and not committed it knows of only if it is still in its slot."""
        for step in sorted(self._unsaved.keys() - self._unreleased):
            if step in self._in_slot.values():
                self._unreleased.add(step)
                self._left_over[step] = reason
            else:
                self.failed(SaveFailure(step, reason))

    def take_saved(self) -> list[Saved]:
        """What was committed since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def take_failures(self) -> list[SaveFailure]:
        """What failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def _settled(self, step: int) -> None:
        self._unreleased.discard(step)
        self._unsaved.pop(step, None)
        self._left_over.pop(step, None)

    def _announcement(self, slot: int, step: int) -> SnapshotTaken:
        return SnapshotTaken(slot, step, durable=step in self._unreleased)
