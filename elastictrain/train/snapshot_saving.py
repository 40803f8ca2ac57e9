"""Saves through snapshots in host memory, which a keeper writes out while training goes on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.checkpointer import FailedSaves
from elastictrain.checkpoint.exchange import from_first, gather_json
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.choice import Rounds, SlotBook
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.snapshot.boxes import local_part
from elastictrain.checkpoint.snapshot.snapshots import Snapshots
from elastictrain.errors import CheckpointError
from elastictrain.fault.exits import WaitNotice, describe_process
from elastictrain.liveness.progress import Phase
from elastictrain.train.cadence import SaveReason
from elastictrain.train.leaving import LeaveDecision, Reached, copy_limit_s, describe_kept
from elastictrain.train.save_wait import SHARE, SaveWait
from elastictrain.train.saving import SavingParts, SynchronousSaving, tell_failure

_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class _FoundSlot:
    """What came of looking for a slot: its place, or None; `late`: because this run has to go."""

    place: int | None
    late: bool = False


class SnapshotSaving:
    """Snapshots between steps; a keeper makes them durable. Where that does not work any more, training waits instead."""

    def __init__(
        self,
        parts: SavingParts,
        snapshots: Snapshots,
        link: SaverLink,
        *,
        slots: Sequence[int],
        steps: Sequence[int | None],
        snapshot_every_steps: int,
        unusable: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots`: their numbers on this rank. `steps`: of the snapshots that all ranks hold in them already. `unusable`: why
        this rank can take no snapshots, if so."""
        self._parts = parts
        self._snapshots = snapshots
        self._link = link
        self._slots = slots
        self._snapshot_every_steps = snapshot_every_steps
        self._unusable = unusable
        self._clock = clock
        self._settled_s = clock()
        self._book = SlotBook(steps)
        self._rounds = Rounds() if link.replicates else None
        self._failed = FailedSaves(parts.max_failed_saves)
        self._told_in_a_row = 0
        self._last_error = ""
        """Why the last save failed; rank 0 alone knows."""

        self._unheard = 0
        """Failures that rank 0 has told a person, but not the other ranks: one flag a step has room for one."""

        self._owed: SaveReason | None = None
        self._owed_since_s = 0.0
        self._durable_step = -1
        """The newest that was to become durable."""

        self._durable_reason: SaveReason | None = None
        self._wait = SaveWait(parts, link, clock=clock)
        self._first_begun: int | None = None
        self._none_had = False
        self._dropped_old = False
        self._fallback: SynchronousSaving | None = None

    @property
    def num_notes(self) -> int:
        return 2 * len(self._slots) + 6

    @property
    def needs_settled(self) -> bool:
        return self._fallback is not None

    @property
    def owes(self) -> bool:
        return self._fallback is not None and self._owed is not None

    def first_step_done(self) -> None:
        self._snapshots.make_room()

    def notes(self, step: int) -> tuple[bool, ...]:
        if self._fallback is not None:
            return (False,) * self.num_notes
        due = self._owed is not None or (self._snapshot_every_steps > 0 and (step + 1) % self._snapshot_every_steps <= 1)
        status = self._snapshots.status(due=due, none_had=self._none_had)
        failed, saved = self._take_news()
        unsaved = self._parts.rank == 0 and self._durable_step > self._wait.saved_step
        busy, torn = [one.busy for one in status], [one.torn for one in status]
        return (*busy, *torn, failed, saved, unsaved, bool(self._trouble()), *self._link.sending())

    def hear(self, step: int, notes: Sequence[bool]) -> None:
        if self._fallback is not None:
            return
        count = len(self._slots)
        self._book.hear(step, busy=notes[:count], torn=notes[count : 2 * count])
        failed, saved, unsaved, unusable, sending, sending_failed = notes[2 * count :]
        if self._rounds is not None:
            self._rounds.hear(step, sending=sending, failed=sending_failed)
        if saved:
            self._failed = self._failed.succeeded()
        if failed:
            self._failed = self._failed.failed()
            if self._failed.too_many:
                # One flag a step has no room for the reason, which rank 0 alone knows.
                error = from_first(self._last_error.encode, group=self._parts.group).decode()
                self._failed.check(CheckpointError(error), kept=self._describe_kept(self._book.newest_whole()))
        if unusable:
            if unsaved or self._durable_step >= step:
                # What was on its way, or has begun since, may never arrive.
                self._owed = self._owed or self._durable_reason
            self._fall_back()

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        if self._fallback is not None:
            reason, self._owed = self._owed or reason, None
            self._fallback.snapshot(step, reason=reason)
            return
        self._replicate(step)
        if self._owed is None:
            self._owed_since_s = self._clock()
        self._owed = reason or self._owed
        if self._owed is None and not (self._snapshot_every_steps and step % self._snapshot_every_steps == 0):
            return
        place = self._book.choose(protected=self._rounds.protected if self._rounds is not None else ())
        self._none_had = place is None
        if place is None:
            return
        self._begin(place, step, self._owed)
        self._owed = None
        # What has just begun is not whole, so these lie in another slot.
        if not self._dropped_old and self._is_ours(self._book.newest_whole()):
            if self._rounds is not None and not self._is_ours(self._rounds.safe):
                # What older incarnations left on other hosts is what there is if this host is lost.
                return
            # One of this incarnation is whole on all ranks and stays until the next one is: older ones are of no use.
            self._dropped_old = True
            self._link.tell({"op": "old", "slots": sum(1 << slot for slot in self._slots)})

    def _is_ours(self, step: int | None) -> bool:
        """Whether it is a step of which this incarnation has begun a snapshot."""
        return step is not None and self._first_begun is not None and step >= self._first_begun

    def settled(self, step: int) -> None:
        now_s = self._clock()
        self._link.step_took(now_s - self._settled_s)
        self._settled_s = now_s
        self._snapshots.deliver(step, self._parts.state.scalars(step, global_batch=self._parts.global_batch))

    def before_update(self) -> None:
        # Also when no more snapshots are taken: the last one may still be on its way.
        self._snapshots.before_update()

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        parts = self._parts
        parts.tracker.set_phase(Phase.SAVE, step=step)
        # What is being sent holds its slot, and this step is newer.
        self._link.replicate(on=False)
        self._snapshots.spare(())
        held: Reached | None = None
        while self._fallback is None:
            found = self._wait_for_slot()
            if found.late:
                return held or self._reached_before()
            if found.place is None:
                break
            parts.tracker.set_phase(Phase.SAVE, step=step)
            self._begin(found.place, step, reason, awaited=True)
            self._snapshots.before_update()
            parts.comparison.check(step)
            self._snapshots.deliver(step, parts.state.scalars(step, global_batch=parts.global_batch))
            verdict = self._outcome(step)
            parts.tracker.set_phase(Phase.SAVE, step=step)
            held = Reached(step, verdict.tier) if verdict.tier != "nothing" else held
            if not verdict.error:
                self._failed = self._failed.succeeded() if verdict.tier == "storage" else self._failed
                return Reached(step, verdict.tier)
            self._failed = self._failed.failed()
            if parts.rank == 0:
                tell_failure(parts, step, error=verdict.error, in_a_row=self._failed.in_a_row)
            if held is not None and verdict.limited and self._failed.in_a_row >= parts.max_failed_saves:
                # Storage is of no use now. Memory has the step, and its keeper tries once more when we are gone.
                return held
            kept = self._describe_kept(held.step if held is not None else None)
            self._failed.check(CheckpointError(verdict.error), kept=kept)
        return (self._fallback or self._fall_back()).save_now(step, reason)

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

    def _begin(self, place: int, step: int, reason: SaveReason | None, *, awaited: bool = False) -> None:
        # What is found is known when the step is settled, and its snapshot is not whole before.
        self._parts.comparison.begin(step)
        parts = {name: local_part(tensor) for name, tensor in self._parts.state.tensors().items()}
        self._snapshots.begin(place, step, reason=reason or "", parts=parts, awaited=awaited)
        if reason is not None:
            self._durable_step, self._durable_reason = step, reason
        self._book.started(place, step)
        self._first_begun = step if self._first_begun is None else self._first_begun

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
        self._wait.note(saved)
        saved_step = max((one.step for one in saved), default=-1)
        # What is newer than a success came after it: then the others hear of both, of the success first.
        for failure in sorted(failures, key=lambda one: one.step):
            if failure.step > saved_step >= 0:
                self._succeeded()
                saved_step = -1
            self._told_in_a_row += 1
            self._unheard += 1
            self._last_error = failure.error
            tell_failure(self._parts, failure.step, error=failure.error, in_a_row=self._told_in_a_row)
        if saved_step >= 0:
            self._succeeded()
        failed = self._unheard > 0
        self._unheard -= failed
        return failed, bool(saved)

    def _succeeded(self) -> None:
        self._told_in_a_row = self._unheard = 0

    def _wait_for_slot(self) -> _FoundSlot:
        """The slot for a snapshot that cannot be put off. Collective: yes."""
        deadline = self._clock() + SHARE * self._parts.save_timeout_s
        step = 1 << 62
        # The step that is whole on two hosts stays as long as another slot can be had.
        safe = (self._rounds.safe,) if self._rounds is not None else ()
        notice = WaitNotice(self._parts.say, clock=self._clock)
        while True:
            status = self._snapshots.status(due=True, none_had=self._none_had)
            cannot = bool(self._unusable()) or self._clock() > deadline
            own: list[JsonValue] = [[one.busy for one in status], [one.torn for one in status], cannot, self._parts.left_s()]
            busy, torn = [False] * len(self._slots), [False] * len(self._slots)
            out_of_time = False
            for of_rank in gather_json(own, group=self._parts.group):
                assert isinstance(of_rank, list)  # noqa: S101
                its_busy, its_torn, it_cannot, its_left_s = of_rank
                if it_cannot:
                    return _FoundSlot(None)
                busy = [a or bool(b) for a, b in zip(busy, its_busy, strict=True)]  # type: ignore[arg-type]
                torn = [a or bool(b) for a, b in zip(torn, its_torn, strict=True)]  # type: ignore[arg-type]
                out_of_time |= isinstance(its_left_s, int | float) and its_left_s <= 0
            self._book.hear(step, busy=busy, torn=torn)
            place = self._book.choose(protected=safe)
            place = self._book.choose() if place is None else place
            self._none_had = place is None
            if place is not None:
                return _FoundSlot(place)
            if out_of_time:
                return _FoundSlot(None, late=True)
            if self._parts.rank == 0:
                notice.tell(lambda: f"the saver ({describe_process(self._link.pid)}) to free host memory", until_s=deadline)
            time.sleep(_PAUSE_S)

    def _describe_kept(self, step: int | None) -> str:
        return describe_kept(step, where=self._parts.memory_place)

    def _reached_before(self) -> Reached:
        """Of the steps before: all slots hold what is still being written, and no more than that will be had."""
        in_memory = self._book.newest_whole()
        if in_memory is None:
            return Reached(max(0, self._wait.saved_step), "storage" if self._wait.saved_step >= 0 else "nothing")
        return Reached(in_memory, "storage" if self._wait.saved_step >= in_memory else "memory")

    def _outcome(self, step: int) -> LeaveDecision:
        """Waits until the snapshot of a step is whole, and then as long as there is time for storage. Collective: yes.

        The watchdog takes both for one phase, so they have one limit.
        """
        limit_s = SHARE * self._parts.save_timeout_s
        deadline_s = self._clock() + limit_s
        error, left = "", self._parts.left_s()
        try:
            self._snapshots.wait(step, timeout_s=copy_limit_s(left, most_s=limit_s))
        except CheckpointError as exception:
            error = str(exception)
        told = [row for row in gather_json([error, left is not None], group=self._parts.group) if isinstance(row, list)]
        errors = [str(row[0]) for row in told if row[0]]
        if errors:
            return LeaveDecision("nothing", any(row[1] for row in told), errors[0])
        can_replicate, in_a_row = self._rounds is not None, self._failed.in_a_row
        return self._wait.until_safe(step, can_replicate=can_replicate, in_a_row=in_a_row, deadline_s=deadline_s)

    def _fall_back(self) -> SynchronousSaving:
        if self._parts.rank == 0:
            reason = self._trouble() or "another rank can take no snapshots"
            self._parts.say(f"no more snapshots in host memory ({reason}): checkpoints are written while training waits")
        self._fallback = SynchronousSaving(self._parts)
        # Another start of this run on this host may need them while we go on.
        self._snapshots.let_go()
        return self._fallback
