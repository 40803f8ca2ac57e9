"""Saves through snapshots in host memory, which a keeper writes out while training goes on."""

import time
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.exchange import from_first, gather_json
from elastictrain.checkpoint.failed_saves import FailedSaves
from elastictrain.checkpoint.keeper.link import KeeperLink
from elastictrain.checkpoint.memory.choice import Rounds, SlotBook
from elastictrain.checkpoint.snapshot.boxes import local_part
from elastictrain.checkpoint.snapshot.snapshots import Snapshots
from elastictrain.errors import CheckpointError
from elastictrain.fault.whereabouts import Phase
from elastictrain.train.cadence import SaveReason
from elastictrain.train.saving import SavingParts, SynchronousSaving, tell_failure

_PAUSE_S = 0.02
_SHARE = 0.9
"""Of the limit of a phase: what is waited for in it gives up before the watchdog does."""


class SnapshotSaving:
    """Snapshots between steps; a keeper makes them durable. Where that does not work any more, training waits instead."""

    def __init__(
        self,
        parts: SavingParts,
        snapshots: Snapshots,
        link: KeeperLink,
        *,
        slots: Sequence[int],
        steps: Sequence[int | None],
        every_steps: int,
        unusable: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots`: their numbers on this rank. `steps`: of the snapshots that all ranks hold in them already. `unusable`: why
        this rank can take no snapshots, if so."""
        self._parts = parts
        self._snapshots = snapshots
        self._link = link
        self._slots = slots
        self._every_steps = every_steps
        self._unusable = unusable
        self._clock = clock
        self._settled_s = clock()
        self._book = SlotBook(steps)
        self._rounds = Rounds() if link.replicates else None
        self._failed = FailedSaves(parts.max_failed_saves)
        self._owed: SaveReason | None = None
        self._owed_since_s = 0.0
        self._saved_step = -1
        self._num_started = 0
        self._dropped_old = False
        self._fallback: SynchronousSaving | None = None

    @property
    def num_notes(self) -> int:
        return 2 * len(self._slots) + 5

    @property
    def needs_settled(self) -> bool:
        return self._fallback is not None

    def first_step_done(self) -> None:
        self._snapshots.make_room()

    def notes(self, step: int) -> tuple[bool, ...]:
        if self._fallback is not None:
            return (False,) * self.num_notes
        due = self._owed is not None or (self._every_steps > 0 and (step + 1) % self._every_steps <= 1)
        status = self._snapshots.status(due=due)
        failed, saved = self._take_news()
        busy, torn = [one.busy for one in status], [one.torn for one in status]
        return (*busy, *torn, failed, saved, bool(self._trouble()), *self._link.sending())

    def hear(self, step: int, notes: Sequence[bool]) -> None:
        if self._fallback is not None:
            return
        count = len(self._slots)
        self._book.hear(step, busy=notes[:count], torn=notes[count : 2 * count])
        failed, saved, unusable, sending, sending_failed = notes[2 * count :]
        if self._rounds is not None:
            self._rounds.hear(step, sending=sending, failed=sending_failed)
        if saved:
            self._failed = self._failed.succeeded()
        if failed:
            self._failed = self._failed.failed()
            self._failed.check(CheckpointError("the log of rank 0 tells it"))
        if unusable:
            self._fall_back()

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        if self._fallback is not None:
            self._fallback.snapshot(step, reason=reason)
            return
        self._replicate(step)
        if self._owed is None:
            self._owed_since_s = self._clock()
        self._owed = reason or self._owed
        if self._owed is None and not (self._every_steps and step % self._every_steps == 0):
            return
        place = self._book.choose(protected=self._rounds.protected if self._rounds is not None else ())
        if place is None:
            return
        self._begin(place, step, self._owed or "")
        self._owed = None
        if not self._dropped_old and self._num_started > 2:
            # Before a third snapshot begins, one of this incarnation is whole on all ranks: older ones are of no use.
            self._dropped_old = True
            self._link.tell({"op": "old", "slots": sum(1 << slot for slot in self._slots)})

    def settled(self, step: int) -> None:
        now_s = self._clock()
        self._link.step_took(now_s - self._settled_s)
        self._settled_s = now_s
        self._snapshots.deliver(step, self._parts.state.scalars(step, global_batch=self._parts.global_batch))

    def before_update(self) -> None:
        # Also when no more snapshots are taken: the last one may still be on its way.
        self._snapshots.before_update()

    def save_now(self, step: int, reason: SaveReason) -> None:
        parts = self._parts
        parts.whereabouts.enter(Phase.SAVE, step=step)
        # What is being sent holds its slot; this step is on its way to storage, and needs no replica.
        self._link.replicate(on=False)
        while self._fallback is None:
            place = self._wait_for_slot()
            if place is None:
                break
            parts.whereabouts.enter(Phase.SAVE, step=step)
            self._begin(place, step, reason)
            self._snapshots.before_update()
            self._snapshots.deliver(step, parts.state.scalars(step, global_batch=parts.global_batch))
            error = self._outcome(step)
            parts.whereabouts.enter(Phase.SAVE, step=step)
            if not error:
                self._failed = self._failed.succeeded()
                return
            self._failed = self._failed.failed()
            if parts.rank == 0:
                tell_failure(parts, step, error=error, in_a_row=self._failed.in_a_row)
            self._failed.check(CheckpointError(error))
        (self._fallback or self._fall_back()).save_now(step, reason)

    def close(self, *, finished: bool) -> None:
        self._snapshots.close()
        if finished:
            self._link.finish(self._parts.finish_timeout_s)
        else:
            self._link.close()

    def _replicate(self, step: int) -> None:
        """Have the next round of replicas sent, when the last one is over on all hosts."""
        if self._rounds is None:
            return
        wanted = self._rounds.next(self._book.newest_whole(), at=step)
        # All ranks know this alike, so none of them counts on these slots any more.
        self._snapshots.spare(self._rounds.protected)
        if wanted is not None:
            self._link.send(wanted)

    def _begin(self, place: int, step: int, reason: str) -> None:
        parts = {name: local_part(tensor) for name, tensor in self._parts.state.tensors().items()}
        self._snapshots.begin(place, step, reason=reason, parts=parts)
        self._book.started(place, step)
        self._num_started += 1

    def _trouble(self) -> str:
        """Why this rank can take no snapshots; empty if it can."""
        if self._owed is not None and self._clock() - self._owed_since_s > self._parts.save_timeout_s:
            return f"no slot was free for {self._parts.save_timeout_s:g} s"
        return self._unusable()

    def _take_news(self) -> tuple[bool, bool]:
        """Whether a save has failed, and whether one has succeeded, since this was asked before; rank 0 alone knows."""
        failures, saved, sayings = self._link.take_failures(), self._link.take_saved(), self._link.take_sayings()
        if self._parts.rank != 0:
            return False, False
        for saying in sayings:
            self._parts.say(saying)
        in_a_row = self._failed.in_a_row
        for one in saved:
            self._saved_step = max(self._saved_step, one.step)
            in_a_row = 0
        for failure in failures:
            in_a_row += 1
            tell_failure(self._parts, failure.step, error=failure.error, in_a_row=in_a_row)
        return bool(failures), bool(saved)

    def _wait_for_slot(self) -> int | None:
        """The slot for a snapshot that cannot be put off; None if some rank can take none. Collective: yes."""
        deadline = self._clock() + _SHARE * self._parts.save_timeout_s
        step = 1 << 62
        while True:
            status = self._snapshots.status(due=True)
            late = bool(self._unusable()) or self._clock() > deadline
            told = gather_json([[one.busy for one in status], [one.torn for one in status], late], group=self._parts.group)
            busy, torn = [False] * len(self._slots), [False] * len(self._slots)
            for of_rank in told:
                assert isinstance(of_rank, list)  # noqa: S101
                its_busy, its_torn, its_late = of_rank
                if its_late:
                    return None
                busy = [a or bool(b) for a, b in zip(busy, its_busy, strict=True)]  # type: ignore[arg-type]
                torn = [a or bool(b) for a, b in zip(torn, its_torn, strict=True)]  # type: ignore[arg-type]
            self._book.hear(step, busy=busy, torn=torn)
            place = self._book.choose()
            if place is not None:
                return place
            time.sleep(_PAUSE_S)

    def _outcome(self, step: int) -> str:
        """Waits until the snapshot of a step is in storage; returns what went wrong, if so. Collective: yes."""
        error = ""
        try:
            self._snapshots.wait(step, timeout_s=_SHARE * self._parts.save_timeout_s)
        except CheckpointError as exception:
            error = str(exception)
        errors = [str(one) for one in gather_json(error, group=self._parts.group) if one]
        if errors:
            return errors[0]
        return from_first(lambda: self._wait_for_keeper(step).encode(), group=self._parts.group).decode()

    def _wait_for_keeper(self, step: int) -> str:
        """As rank 0."""
        deadline = self._clock() + _SHARE * self._parts.save_timeout_s
        while self._clock() < deadline:
            for saved in self._link.take_saved():
                self._saved_step = max(self._saved_step, saved.step)
            if self._saved_step >= step:
                return ""
            for failure in self._link.take_failures():
                if failure.step == step:
                    return failure.error
                tell_failure(self._parts, failure.step, error=failure.error, in_a_row=self._failed.in_a_row + 1)
            self._link.wait_for_news(_PAUSE_S)
        return f"it was not durable within {self._parts.save_timeout_s:g} s"

    def _fall_back(self) -> SynchronousSaving:
        if self._parts.rank == 0:
            reason = self._trouble() or "another rank can take no snapshots"
            self._parts.say(f"no more snapshots in host memory ({reason}): checkpoints are written while training waits")
        self._fallback = SynchronousSaving(self._parts)
        # Another start of this run on this host may need them while we go on.
        self._snapshots.let_go()
        return self._fallback
