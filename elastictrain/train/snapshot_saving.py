"""Saves through snapshots in host memory; the saver writes them to storage while training continues."""

import time
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.copier import Arena
from elastictrain.checkpoint.exchange import from_first, gather_records
from elastictrain.checkpoint.memory.cadence import FIRST, RARE, Cadence, spread_interval
from elastictrain.checkpoint.memory.choice import Rounds, SlotBook
from elastictrain.checkpoint.memory.folder import run_folder
from elastictrain.checkpoint.saver.final_save import KEPT_S
from elastictrain.checkpoint.saver.link import News, SaverLink
from elastictrain.checkpoint.saver.messages import OldSlots, Saved, SaveFailure, SlowSave
from elastictrain.checkpoint.snapshots import Snapshots
from elastictrain.checkpoint.tensor_bytes import local_part
from elastictrain.errors import CheckpointError
from elastictrain.fault.exits import WaitNotice, describe_process
from elastictrain.liveness.progress import Phase
from elastictrain.train.saving import (
    LeaveDecision,
    Reached,
    SaveStatus,
    SynchronousSaving,
    copy_limit_s,
    judge,
    least,
)
from elastictrain.train.step import SaveReason, StepFlags

_PAUSE_S, _ROUND_S = 0.02, 0.1
_SHARE = 0.9  # of the limit of a phase: waits inside it end before the watchdog ends the process
_NOW = 1 << 62  # newer than any step: while training waits, every status holds for all steps


class SnapshotSaving:
    """Takes snapshots between steps; the saver makes them durable. Where that fails, training waits for checkpoints instead.
    Its public methods are those of `SynchronousSaving`."""

    def __init__(
        self,
        synchronous: SynchronousSaving,
        snapshots: Snapshots,
        link: SaverLink,
        *,
        rounds: Rounds | None = None,
        pause_s: float = 0.0,
        keeps: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rounds`: of replicas, if any; `pause_s`: least time between learned snapshots; `keeps`: ranks with replicas here."""
        self._synchronous, self._context = synchronous, synchronous.context
        self._snapshots, self._link = snapshots, link
        self._rounds, self._keeps, self._clock = rounds, keeps, clock
        self._first = self._context.identity.rank == 0
        self._group = self._context.group.control
        self._options = self._context.config.checkpoint
        self._save_timeout_s = self._context.config.fault.save_timeout_s
        self._finished_s = clock()
        self._book = SlotBook(snapshots.steps)
        every_steps = self._options.snapshot_every_steps
        self._cadence: Cadence | None = None
        if every_steps == "auto":
            learned = self._context.job.memory.snapshot_interval
            self._cadence = Cadence(len(snapshots.steps), first=learned or FIRST, pause_s=pause_s)
        self._interval = FIRST if every_steps == "auto" else every_steps  # steps between snapshots, as the ranks agree
        self._newest_begun: int | None = None  # step of the newest snapshot, or the one that this generation resumed from
        self._failed_saves = 0  # in a row, as the ranks agree
        self._told_failures = 0  # the same, as rank 0 has reported; flags bring it to the other ranks with a later step
        self._last_error = ""  # of the last failed save; only rank 0 has it
        self._pending_reason: SaveReason | None = None
        self._pending_since_s = 0.0
        self._durable_step = -1  # newest step with a save request
        self._durable_reason: SaveReason | None = None
        self._saved_step = -1  # newest step that the saver has committed; only rank 0 has it
        self._first_begun: int | None = None
        self._none_had = self._dropped_old = self._fallen_back = False

    @property
    def requires_finished_step(self) -> bool:
        return self._fallen_back

    @property
    def save_pending(self) -> bool:
        return self._fallen_back and self._pending_reason is not None

    @property
    def arena(self) -> Arena:
        return self._snapshots.arena

    def first_step_done(self) -> None:
        # Not before: until the first step is done the device has other things to do.
        self._snapshots.arena.start()

    def flags(self, step: int) -> StepFlags:
        """They decide about a snapshot after the next step; after this one, if the loop waits for its figures."""
        if self._fallen_back:
            return StepFlags()
        if self._newest_begun is None:
            self._newest_begun = step - 1
        due = self._pending_reason is not None or self._is_due(step) or self._is_due(step + 1)
        busy, torn = self._snapshots.status(due=due, none_had=self._none_had)
        self._take_news()
        sending, unsent = self._link.sending()
        return StepFlags(
            unsaved=self._first and self._durable_step > self._saved_step,
            unusable=bool(self._trouble()),
            sending=sending,
            unsent=unsent,
            failed_saves=self._told_failures,
            # One rank's clock decides, and the reduction sends it to the others.
            snapshot_interval=self._cadence.interval if self._cadence is not None and self._first else 0,
            busy=busy,
            torn=torn,
        )

    def on_flags(self, step: int, flags: StepFlags) -> None:
        """Take in what the ranks agreed on in `step`. Raises: SavesFailingError."""
        if self._fallen_back:
            return
        self._book.update(step, busy=flags.busy, torn=flags.torn)
        if self._rounds is not None:
            self._rounds.update(step, sending=flags.sending, failed=flags.unsent)
        if self._cadence is not None:
            self._interval = self._spread(flags.snapshot_interval or self._interval, step=step, unsaved=flags.unsaved)
        self._failed_saves = flags.failed_saves
        if self._failed_saves >= self._options.max_failed_saves:
            error = from_first(lambda: self._last_error, group=self._group)
            self._check_failures(CheckpointError(error), kept_step=self._book.newest_whole())
        if flags.unusable:
            if flags.unsaved or self._durable_step >= step:
                # A save that is under way, or has begun since, may never become durable.
                self._pending_reason = self._pending_reason or self._durable_reason
            self._fall_back()

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        """Begin with the snapshots and replicas that are due after `step`. `reason`: why it must become durable, if it must."""
        if self._fallen_back:
            reason, self._pending_reason = self._pending_reason or reason, None
            self._synchronous.snapshot(step, reason=reason)
            return
        if self._rounds is not None:
            # The next round of replicas begins when all hosts have finished the last one. All ranks protect the same slots.
            wanted = self._rounds.next(self._book.newest_whole(), at=step)
            self._snapshots.spare(self._rounds.protected)
            if wanted is not None:
                self._link.send(wanted, safe=self._rounds.safe)
        if self._pending_reason is None:
            self._pending_since_s = self._clock()
        self._pending_reason = reason or self._pending_reason
        if self._pending_reason is None and not self._is_due(step):
            return
        place = self._book.choose(protected=self._rounds.protected if self._rounds is not None else ())
        self._none_had = place is None
        if place is None:
            return
        self._begin(place, step, self._pending_reason)
        self._pending_reason = None
        # The snapshot that has just begun is not whole, so the newest whole one lies in another slot.
        if not self._dropped_old and self._is_ours(self._book.newest_whole()):
            if self._rounds is not None and not self._is_ours(self._rounds.safe_step):
                # Replicas of older generations on other hosts are the only ones if this host is lost.
                return
            # All ranks hold a whole snapshot of this generation, and keep it until the next is whole: older ones are of no use.
            self._dropped_old = True
            self._link.send_message(OldSlots(sum(1 << name.index for name in self._snapshots.arena.names)))

    def step_finished(self, step: int) -> None:
        """The figures of a step are known: learn from its duration, and give its snapshot its counters."""
        now_s = self._clock()
        self._link.step_took(now_s - self._finished_s)
        if self._cadence is not None and self._first:
            # An evaluation after the last step took its time in this one. Slots are made in the background, which slows steps.
            every_steps = self._context.config.train.eval_every_steps
            usable = self._snapshots.ready and not (every_steps and (step - 1) % every_steps == 0)
            if self._cadence.step_took(now_s - self._finished_s, began=self._newest_begun == step, usable=usable):
                self._context.job.learned(self._cadence.learned)
        self._finished_s = now_s
        self._snapshots.deliver(step, self._synchronous.scalars(step))

    def before_update(self) -> None:
        # Also after the fall-back: the last snapshot may still be in flight.
        self._snapshots.before_update()

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        """As `SynchronousSaving`, through host memory until that fails. Collective: yes. Raises: SavesFailingError."""
        self._context.tracker.set_phase(Phase.SAVE, step=step)
        # A replica that is being sent holds its slot, and this step is newer.
        self._link.send(None)
        self._snapshots.spare(())
        held: Reached | None = None
        while not self._fallen_back:
            place = self._wait_for_slot()
            if isinstance(place, Reached):
                return held or place
            if place is None:
                self._fall_back()
                break
            decision = self._save_through(place, step, reason)
            held = Reached(step, decision.tier) if decision.tier != "nothing" else held
            if not decision.error:
                return Reached(step, decision.tier)
            self._failed_saves += 1
            if self._first:
                self._synchronous.record_failure(step, error=decision.error, in_a_row=self._failed_saves)
            if held is not None and decision.limited and self._failed_saves >= self._options.max_failed_saves:
                # Storage fails now. Memory has the step, and its saver tries once more after the workers have left.
                return held
            self._check_failures(CheckpointError(decision.error), kept_step=held.step if held is not None else None)
        return self._synchronous.save_now(step, reason)

    def close(self, *, finished: bool) -> None:
        self._snapshots.close()
        if finished:
            self._link.finish(self._context.config.fault.close_s)
        else:
            self._link.close()

    def detach(self) -> None:
        self._snapshots.stop()
        self._link.close()

    def _begin(self, place: int, step: int, reason: SaveReason | None, *, awaited: bool = False) -> None:
        # The comparison ends with the step, and the snapshot is not whole before that.
        self._synchronous.comparison.begin(step)
        parts = {name: local_part(tensor) for name, tensor in self._synchronous.state.tensors().items()}
        self._snapshots.begin(place, step, reason=reason or "", parts=parts, awaited=awaited)
        if reason is not None:
            self._durable_step, self._durable_reason = step, reason
        self._book.started(place, step)
        self._newest_begun = step
        self._first_begun = step if self._first_begun is None else self._first_begun

    def _is_due(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`; the same on all ranks. If learned, without a slot one step later."""
        if self._cadence is not None:
            # The first one is early: where failures are more frequent than snapshots there would be no progress.
            interval = self._interval if self._first_begun is not None else min(self._interval, FIRST)
            return self._newest_begun is not None and step - self._newest_begun >= interval
        return self._interval > 0 and step % self._interval == 0

    def _spread(self, interval: int, *, step: int, unsaved: bool) -> int:
        """The interval, longer while a save or replicas leave one slot: during each copy into it only an older one is whole."""
        protected = self._rounds.protected if self._rounds is not None else ()
        held = {*((self._durable_step,) if unsaved else ()), *(one for one in protected if one and self._book.holds(one))}
        if len(self._snapshots.steps) - len(held) > 1:
            return interval
        return max(interval, spread_interval(max(0, step - max(held))) if held else RARE)

    def _is_ours(self, step: int | None) -> bool:
        """Whether the snapshot of this step is one that this generation has begun."""
        return step is not None and self._first_begun is not None and step >= self._first_begun

    def _trouble(self) -> str:
        """Why this rank can take no snapshots; empty if it can."""
        if self._pending_reason is not None and self._clock() - self._pending_since_s > self._save_timeout_s:
            return f"no slot was free for {self._save_timeout_s:g} s"
        return self._snapshots.unusable

    def _take_news(self) -> None:
        """As rank 0: report the results of saves since the last call."""
        news = self._link.take_news()
        if not self._first:
            return
        self._note_saved(news)
        # Results that are newer than a success came after it.
        for one in sorted(news, key=lambda one: one.step):
            if isinstance(one, SlowSave):
                trouble = f" ({one.trouble})" if one.trouble else ""
                text = f"step {one.step}: the checkpoint is not written yet after {one.seconds} s{trouble}"
                self._synchronous.observer.print_line(text)
            elif isinstance(one, Saved):
                self._told_failures = 0
            else:
                self._told_failures += 1
                self._last_error = one.error
                self._synchronous.record_failure(one.step, error=one.error, in_a_row=self._told_failures)

    def _note_saved(self, news: Sequence[News]) -> None:
        if steps := [one.step for one in news if isinstance(one, Saved)]:
            self._saved_step = max(self._saved_step, *steps)
            self._context.job.committed(self._saved_step)

    def _save_through(self, place: int, step: int, reason: SaveReason) -> LeaveDecision:
        """Take a snapshot into a slot and wait for its save while there is time. Collective: yes."""
        self._context.tracker.set_phase(Phase.SAVE, step=step)
        self._begin(place, step, reason, awaited=True)
        self._snapshots.before_update()
        self._synchronous.comparison.check(step)
        self._snapshots.deliver(step, self._synchronous.scalars(step))
        # The watchdog counts the copy and the wait for storage as one phase, so they share one limit.
        limit_s = _SHARE * self._save_timeout_s
        deadline_s = self._clock() + limit_s
        error, left_s = "", self._context.left_s()
        try:
            self._snapshots.wait(step, timeout_s=copy_limit_s(left_s, most_s=limit_s))
        except CheckpointError as exception:
            error = str(exception)
        told = gather_records(SaveStatus(left_s, error=error), group=self._group)
        if errors := [one.error for one in told if one.error]:
            decision = LeaveDecision("nothing", least([one.left_s for one in told]) is not None, errors[0])
        else:
            decision = self._wait_until_safe(step, deadline_s=deadline_s)
        self._context.tracker.set_phase(Phase.SAVE, step=step)
        return decision

    def _wait_until_safe(self, step: int, *, deadline_s: float) -> LeaveDecision:
        """Wait until the step, of which all ranks have a whole snapshot, is in storage, its save has failed, or the run must
        end. In a run that must end, the step is sent to other hosts as well. `deadline_s`: monotonic. Collective: yes."""
        replicating, what = False, f"to write step {step} from host memory to storage"
        notice = WaitNotice(self._synchronous.observer.print_line, clock=self._clock)
        while True:
            told = gather_records(self._save_status(step, deadline_s=deadline_s), group=self._group)
            decision = judge(told, replicating=replicating)
            if decision is not None:
                return decision
            left_s = least([one.left_s for one in told])
            if self._rounds is not None and not replicating and left_s is not None:
                # No rank trains any more, so an unpaced transfer slows nothing down.
                self._link.send(step, unpaced=True, safe=self._rounds.safe)
                replicating = True
            if self._first:
                until_s = deadline_s if left_s is None else min(deadline_s, self._clock() + left_s)
                notice.tell(lambda: f"the saver ({describe_process(self._link.pid)}) {what}", until_s=until_s)
                self._link.wait_for_news(_ROUND_S)

    def _save_status(self, step: int, *, deadline_s: float) -> SaveStatus:
        """The progress of this rank's part of a save, as its saver reports it."""
        sending, unsent = self._link.sending()
        # A host without a saver writes nothing, and rank 0 would wait for it until its limit.
        saved, error = False, self._link.broken
        if self._first:
            news = self._link.take_news()
            self._note_saved(news)
            saved, error = self._saved_step >= step, ""
            for failure in [one for one in news if isinstance(one, SaveFailure) and not saved]:
                if failure.step == step:
                    error = failure.error
                    break
                self._synchronous.record_failure(failure.step, error=failure.error, in_a_row=self._failed_saves + 1)
            if not saved and not error and self._clock() >= deadline_s:
                error = f"it was not durable within {self._save_timeout_s:g} s"
        stays = (request := self._context.stop_request()) is not None and request.host_stays
        return SaveStatus(self._context.left_s(), sending, unsent, saved, error, stays, self._keeps)

    def _wait_for_slot(self) -> int | Reached | None:
        """The slot for a snapshot that must be taken now; at the deadline, what the run has reached; None where no more
        snapshots can be taken. Collective: yes."""
        deadline_s = self._clock() + _SHARE * self._save_timeout_s
        # The step that is whole on two hosts stays while another slot can be had.
        safe = (self._rounds.safe_step,) if self._rounds is not None else ()
        notice = WaitNotice(self._synchronous.observer.print_line, clock=self._clock)
        while True:
            busy, torn = self._snapshots.status(due=True, none_had=self._none_had)
            error = self._snapshots.unusable or ("no slot is free" if self._clock() > deadline_s else "")
            told = gather_records(SaveStatus(self._context.left_s(), error=error, busy=busy, torn=torn), group=self._group)
            if any(one.error for one in told):
                return None
            busy = tuple(map(any, zip(*(one.busy for one in told), strict=True)))
            torn = tuple(map(any, zip(*(one.torn for one in told), strict=True)))
            self._book.update(_NOW, busy=busy, torn=torn)
            place = self._book.choose(protected=safe)
            place = self._book.choose() if place is None else place
            self._none_had = place is None
            if place is not None:
                return place
            left_s = least([one.left_s for one in told])
            if left_s is not None and left_s <= 0:
                # All slots hold snapshots that are still being written, and no slot becomes free in time.
                in_memory = self._book.newest_whole()
                if in_memory is None:
                    return Reached(max(0, self._saved_step), "storage" if self._saved_step >= 0 else "nothing")
                return Reached(in_memory, "storage" if self._saved_step >= in_memory else "memory")
            if self._first:
                notice.tell(lambda: f"the saver ({describe_process(self._link.pid)}) to free host memory", until_s=deadline_s)
            time.sleep(_PAUSE_S)

    def _check_failures(self, cause: Exception, *, kept_step: int | None) -> None:
        """`kept_step`: the newest step that is whole in host memory. Raises: SavesFailingError."""
        kept = ""
        if kept_step is not None:
            identity, folder = self._context.identity, run_folder(self._options.memory_dir, self._context.config.run.dir)
            host = f"host {identity.host}" if identity.only_host else "the hosts"
            kept = (
                f"step {kept_step} is in the memory of {host} ({folder}), "
                f"where the saver keeps it for up to {KEPT_S / 3600:g} h and continues trying to write it; the same command on "
                "the same hosts continues from there"
            )
        self._synchronous.check_failures(self._failed_saves, cause=cause, kept=kept)

    def _fall_back(self) -> None:
        if self._first:
            reason = self._trouble() or "another rank can take no snapshots"
            message = f"no more snapshots in host memory ({reason}): falling back to synchronous checkpoints"
            self._synchronous.observer.print_line(message)
        self._fallen_back = True
        # Another start of this run on this host may need the slots while this run continues.
        self._snapshots.let_go()


Saving = SynchronousSaving | SnapshotSaving  # how the loop saves
