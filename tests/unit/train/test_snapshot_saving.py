"""Saving through snapshots with everything around it made up: what it does when something does not work."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.checkpoint.memory.choice import Rounds
from elastictrain.checkpoint.memory.folder import SlotName
from elastictrain.checkpoint.memory.slot import SnapshotId
from elastictrain.checkpoint.saver.link import News, SaverLink
from elastictrain.checkpoint.saver.messages import OldSlots, Saved, SaveFailure, SlowSave
from elastictrain.checkpoint.snapshots import Snapshots
from elastictrain.errors import CheckpointError, ReplicasDivergedError, SavesFailingError, StorageError
from elastictrain.events import CheckpointFailed, Event
from elastictrain.fault.exits import FIRST_S
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import Reached, SaveStatus, SynchronousSaving, Tier
from elastictrain.train.snapshot_saving import SnapshotSaving
from elastictrain.train.state import TrainState
from elastictrain.train.step import SaveReason, StepFlags
from tests.unit.train.parts import FakeComparison, FakeObserver, context_of
from tests.unit.train.test_loop import config

INTERVAL = cast(SaveReason, "interval")


class FakeState:
    def tensors(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(2)}

    def changed_by_forward(self) -> frozenset[str]:
        return frozenset()

    def scalars(self, step: int, *, global_batch: int) -> dict[str, int]:
        return {"step": step}


@dataclass
class FakeCheckpointer:
    """Saves while training waits; `fails` times it does not."""

    saved: list[int] = field(default_factory=list)
    fails: int = 0

    def save(self, step: int, **_: object) -> None:
        if self.fails:
            self.fails -= 1
            raise StorageError("ENOENT")
        self.saved.append(step)


@dataclass
class FakeSnapshots:
    """Slots that are free and whole, unless told otherwise."""

    slots: int
    steps: list[int | None]
    unusable: str = ""
    busy: bool = False
    slow: bool = False
    """Copies do not end."""

    ready: bool = True

    began: list[tuple[int, int, str]] = field(default_factory=list)
    none_had: list[bool] = field(default_factory=list)
    let_go_of: int = 0
    breaks: str = ""
    copying: Callable[[float], None] = lambda timeout_s: None
    """What happens while a copy is waited for."""

    spared: list[tuple[int | None, ...]] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)

    @property
    def arena(self) -> object:
        return SimpleNamespace(names=[SlotName("own", 0, index) for index in range(self.slots)])

    def status(self, *, due: bool, none_had: bool = False) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        self.none_had.append(none_had)
        copied = {place for place, *_ in self.began} if self.slow else set()
        torn = tuple(place in copied for place in range(self.slots))
        return tuple(self.busy or one for one in torn), torn

    def begin(self, place: int, step: int, *, reason: str, parts: Mapping[str, Tensor], awaited: bool = False) -> None:
        self.began.append((place, step, reason))

    def deliver(self, step: int, state: object) -> None:
        self.delivered.append(step)

    def before_update(self) -> None: ...

    def spare(self, steps: Iterable[int | None]) -> None:
        self.spared.append(tuple(steps))

    def wait(self, step: int, *, timeout_s: float) -> None:
        self.copying(timeout_s)
        if self.breaks:
            raise CheckpointError(self.breaks)

    def let_go(self) -> None:
        self.let_go_of += 1


@dataclass
class FakeLink:
    """A saver that answers what a test puts here."""

    saved: list[Saved] = field(default_factory=list)
    failures: list[SaveFailure] = field(default_factory=list)
    slow: list[SlowSave] = field(default_factory=list)
    told: list[Mapping[str, object]] = field(default_factory=list)
    sent: list[object] = field(default_factory=list)
    safe: list[SnapshotId | None] = field(default_factory=list)
    sends: tuple[bool, bool] = (False, False)
    broken: str = ""
    pid: int = 4242
    news: list[Callable[[], None]] = field(default_factory=list)
    """What happens while it is waited for, one after another."""

    def send(self, step: int | None, *, unpaced: bool = False, safe: SnapshotId | None = None) -> None:
        self.sent.append(step if not unpaced else (step, "unpaced"))
        self.safe.append(safe)
        self.sends = (step is not None, False)

    def take_news(self) -> list[News]:
        taken: list[News] = [*self.failures, *self.saved, *self.slow]
        self.failures, self.saved, self.slow = [], [], []
        return taken

    def sending(self) -> tuple[bool, bool]:
        return self.sends

    def step_took(self, seconds: float) -> None: ...

    def send_message(self, message: OldSlots) -> None:
        self.told.append(message)

    def wait_for_news(self, timeout_s: float) -> None:
        if self.news:
            self.news.pop(0)()


@dataclass
class Stage:
    """One rank in a world of one."""

    saving: SnapshotSaving
    snapshots: FakeSnapshots
    link: FakeLink
    checkpointer: FakeCheckpointer
    said: list[str]
    events: list[Event]
    clock: list[float]
    left: list[float | None]
    """Seconds that are left to save in."""

    comparison: FakeComparison
    learned: list[int]
    """Intervals of snapshots, noted for the next generation."""

    def step(self, step: int, *, reason: SaveReason | None = None) -> None:
        """As the loop does it: what was said when a step began is heard when the next one has."""
        self.saving.on_flags(step, agreed(self.saving.flags(step)))
        self.saving.snapshot(step, reason=reason)
        self.comparison.check(step)
        self.saving.step_finished(step)
        self.saving.before_update()


def agreed(flags: StepFlags) -> StepFlags:
    """In a world of one."""
    return StepFlags.decode(flags.encode())


def stage(
    *,
    slots: int = 2,
    snapshot_every_steps: int | Literal["auto"] = 2,
    save_timeout_s: float = 100.0,
    rounds: Rounds | None = None,
    steps: list[int | None] | None = None,
    max_failed_saves: int = 2,
    rank: int = 0,
    seconds_a_look: float = 0.0,
    eval_every_steps: int = 0,
    learned_interval: int = 0,
    keeps: tuple[int, ...] = (),
    request: StopRequest | None = None,
) -> Stage:
    snapshots = FakeSnapshots(slots, steps or [None] * slots)
    link, checkpointer = FakeLink(), FakeCheckpointer()
    said: list[str] = []
    events: list[Event] = []
    clock = [0.0]

    def look() -> float:
        clock[0] += seconds_a_look
        return clock[0]

    left: list[float | None] = [None]
    comparison = FakeComparison()
    learned: list[int] = []
    plain = config(steps=100, max_failed_saves=max_failed_saves, eval_every=eval_every_steps)
    context = context_of(
        config=replace(
            plain,
            checkpoint=replace(plain.checkpoint, snapshot_every_steps=snapshot_every_steps),
            fault=replace(plain.fault, save_timeout_s=save_timeout_s),
        ),
        identity=Identity(rank, 2, rank, 2, "here", launched=True),
        journal=SimpleNamespace(record=events.append, flush=lambda: None),
        left_s=lambda: left[0],
        stop_request=lambda: request,
        job=SimpleNamespace(
            committed=lambda step: None, memory=JobMemory(snapshot_interval=learned_interval), learned=learned.append
        ),
    )
    synchronous = SynchronousSaving(
        context,
        cast(Checkpointer, checkpointer),
        cast(TrainState, FakeState()),
        cast(ReplicaComparison, comparison),
        None,
        FakeObserver(said),
    )
    saving = SnapshotSaving(
        synchronous,
        cast(Snapshots, snapshots),
        cast(SaverLink, link),
        rounds=rounds,
        keeps=keeps,
        clock=look,
    )
    return Stage(saving, snapshots, link, checkpointer, said, events, clock, left, comparison, learned)


def test_snapshots_go_round_the_slots_and_carry_their_reason() -> None:
    one = stage()
    for step in range(1, 10):
        one.step(step, reason=INTERVAL if step == 5 else None)
    assert one.snapshots.began == [(0, 2, ""), (1, 4, ""), (0, 5, "interval"), (1, 6, ""), (0, 8, "")]
    assert one.link.told == [OldSlots(3)]
    assert (one.said, one.checkpointer.saved, one.saving.requires_finished_step) == ([], [], False)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_older_snapshots_stay_until_a_new_one_is_whole_and_stays(slots: int) -> None:
    """A run that is killed in its first copies goes on from them."""
    one = stage(slots=slots, snapshot_every_steps=1)
    one.snapshots.slow = True
    for step in range(1, 8):
        one.step(step)
    assert (len(one.snapshots.began), one.link.told) == (slots, [])
    one.snapshots.slow = False
    for step in range(8, 12):
        one.step(step)
    # Where there is one slot, nothing is whole while a copy goes on.
    assert one.link.told == ([OldSlots(2**slots - 1)] if slots > 1 else [])


def test_a_snapshot_of_the_incarnation_before_is_none_of_this_one() -> None:
    one = stage(slots=3, snapshot_every_steps=1, steps=[10, None, None])
    one.snapshots.slow = True
    for step in range(11, 16):
        one.step(step)
    assert (one.snapshots.began, one.link.told) == ([(1, 11, ""), (2, 12, "")], [])
    one.snapshots.slow = False
    one.step(16)
    assert one.snapshots.began[2:] == [(0, 16, "")]
    assert one.link.told == [OldSlots(7)]


def test_older_snapshots_stay_until_other_hosts_hold_a_new_one() -> None:
    """With them go the replicas of the older ones, which are what there is when a host is lost."""
    one = stage(slots=3, snapshot_every_steps=1, rounds=Rounds())
    for step in range(1, 8):
        one.step(step)
    assert (one.link.sent, one.link.told) == ([1], [])
    one.link.sends = (False, False)
    for step in range(8, 10):
        one.step(step)
    assert one.link.told == [OldSlots(7)]


def test_until_other_hosts_hold_a_new_step_the_one_that_they_hold_stays() -> None:
    """A host that is lost soon after a recovery takes no step away but those that nobody else had."""
    before = SnapshotId("000001-aa", 7)
    rounds = Rounds("000002-bb", before, after_step=12)
    one = stage(slots=3, snapshot_every_steps=1, steps=[12, None, 7], rounds=rounds)
    for step in range(13, 18):
        one.step(step)
    # The one that was restored is older than what other hosts can have soon.
    assert (one.link.sent, one.link.safe) == ([13], [before])
    assert {place for place, *_ in one.snapshots.began} == {0, 1}
    one.link.sends = (False, False)
    for step in range(18, 21):
        one.step(step)
    assert one.link.safe[1:] == [("000002-bb", 13)]
    assert {place for place, *_ in one.snapshots.began} == {0, 1, 2}


def test_a_save_that_finds_no_slot_is_pending_and_comes_with_the_next_step() -> None:
    one = stage(snapshot_every_steps=0)
    one.snapshots.busy = True
    one.step(4, reason=INTERVAL)
    one.step(5)
    assert one.snapshots.began == []
    one.snapshots.busy = False
    one.step(6)
    one.step(7)
    assert one.snapshots.began == [(0, 6, "interval")]
    # Ranks that each keep another slot back are told that the group has found none.
    assert one.snapshots.none_had == [False, True, True, False]


def test_a_save_that_is_pending_for_too_long_is_made_while_training_waits() -> None:
    one = stage(snapshot_every_steps=0)
    one.snapshots.busy = True
    one.step(4, reason=INTERVAL)
    one.clock[0] = 99.0
    one.step(5)
    assert not one.saving.requires_finished_step
    one.clock[0] = 101.0
    one.step(6)
    assert one.saving.requires_finished_step
    (said,) = one.said
    assert "100 s" in said
    assert one.snapshots.let_go_of == 1
    assert (one.checkpointer.saved, one.snapshots.began) == ([6], [])
    assert not one.saving.save_pending
    one.step(7)
    one.step(8, reason=INTERVAL)
    assert (one.checkpointer.saved, one.snapshots.began) == ([6, 8], [])


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_save_that_goes_down_with_the_saver_is_pending(saved: bool, failed: bool) -> None:
    one = stage(snapshot_every_steps=0)
    one.step(4, reason=INTERVAL)
    one.step(5)
    assert one.snapshots.began == [(0, 4, "interval")]
    one.link.saved = [Saved(4, "step-4", 8)] if saved else []
    one.link.failures = [SaveFailure(4, "gone")] if failed and not saved else []
    one.snapshots.unusable = "gone"
    one.saving.on_flags(6, one.saving.flags(6))
    assert (one.saving.requires_finished_step, one.saving.save_pending) == (True, not saved)
    one.saving.snapshot(6, reason=None)
    one.saving.snapshot(7, reason=None)
    assert one.checkpointer.saved == ([] if saved else [6])


def test_a_save_that_began_after_trouble_was_noted_is_pending() -> None:
    one = stage(snapshot_every_steps=0)
    one.step(3)
    one.snapshots.unusable = "gone"
    flags = one.saving.flags(4)
    # What was said when step 4 began is heard when it is settled, and then its snapshot has begun already.
    one.saving.snapshot(4, reason=INTERVAL)
    one.saving.on_flags(4, flags)
    one.saving.snapshot(5, reason=None)
    assert (one.snapshots.began, one.checkpointer.saved) == ([(0, 4, "interval")], [5])


def test_a_saver_that_is_gone_for_good_does_not_end_saving() -> None:
    one = stage()
    one.step(2)
    one.snapshots.unusable = "ECHILD"
    one.step(3)
    one.step(4, reason=INTERVAL)
    one.saving.save_now(5, INTERVAL)
    assert one.snapshots.began == [(0, 2, "")]
    assert one.checkpointer.saved == [4, 5]
    assert "ECHILD" in one.said[0]


def test_saves_that_fail_are_told_and_too_many_in_a_row_end_the_run() -> None:
    one = stage()
    one.link.failures = [SaveFailure(2, "ENOSPC")]
    one.step(3)
    one.link.saved = [Saved(3, "step-3", 8)]
    one.step(4)
    one.link.failures = [SaveFailure(4, "ENOSPC")]
    one.step(5)
    one.link.failures = [SaveFailure(5, "ENOSPC")]
    with pytest.raises(SavesFailingError, match="ENOSPC"):
        one.step(6)
    counts = [(event.step, event.in_a_row) for event in one.events if isinstance(event, CheckpointFailed)]
    assert counts == [(2, 1), (4, 1), (5, 2)]
    assert "step 5" in one.said[-1]


def test_failures_of_one_step_count_one_by_one() -> None:
    one = stage()
    one.link.failures = [SaveFailure(2, "full"), SaveFailure(3, "full")]
    said = one.saving.flags(4)
    one.saving.flags(5)
    with pytest.raises(SavesFailingError, match=r"^2 "):
        one.saving.on_flags(4, said)
    assert [event.in_a_row for event in one.events if isinstance(event, CheckpointFailed)] == [1, 2]


def test_a_success_ends_the_row_of_what_failed_before_it() -> None:
    one = stage()
    one.link.failures, one.link.saved = [SaveFailure(2, "full")], [Saved(3, "step-3", 8)]
    one.step(4)
    one.link.failures = [SaveFailure(5, "full")]
    one.step(6)
    assert [event.in_a_row for event in one.events if isinstance(event, CheckpointFailed)] == [1, 1]


@pytest.mark.parametrize("seed", range(30))
def test_what_a_person_is_told_is_what_the_ranks_count(seed: int) -> None:
    chance = random.Random(seed)
    one = stage(snapshot_every_steps=0, max_failed_saves=10**6)
    said = one.saving.flags(0)
    saved_step = -1
    for step in range(1, 40):
        for of in range(10 * step, 10 * step + (chance.choice([0, 0, 1, 1, 2, 3]) if step < 30 else 0)):
            if chance.random() < 0.3:
                one.link.saved.append(Saved(of, "", 8))
                saved_step = of
            else:
                one.link.failures.append(SaveFailure(of, "full"))
        flags = one.saving.flags(step)
        one.saving.on_flags(step - 1, said)
        said = flags
    fates = [(event.step, event.in_a_row) for event in one.events if isinstance(event, CheckpointFailed)]
    after = [in_a_row for step, in_a_row in fates if step > saved_step]
    assert after == list(range(1, len(after) + 1))
    assert one.saving.flags(40).failed_saves == len(after)


def test_what_the_saver_wants_to_be_told_is_told() -> None:
    one = stage()
    one.link.slow = [SlowSave(2, 20, "503")]
    one.step(3)
    (said,) = one.said
    assert all(token in said for token in ("step 2", "20 s", "503"))


def test_a_save_that_cannot_be_put_off_is_tried_again() -> None:
    one = stage()
    one.link.failures = [SaveFailure(9, "503")]
    one.link.news = [lambda: None, lambda: one.link.saved.append(Saved(9, "step-9", 8))]
    one.saving.save_now(9, INTERVAL)
    assert one.snapshots.began == [(0, 9, "interval"), (1, 9, "interval")]
    assert [event.error for event in one.events if isinstance(event, CheckpointFailed)] == ["503"]


def test_a_copy_that_breaks_is_a_failed_save() -> None:
    one = stage()
    one.snapshots.breaks = "EFAULT"
    with pytest.raises(SavesFailingError, match="EFAULT"):
        one.saving.save_now(9, INTERVAL)
    assert len(one.snapshots.began) == 2


def test_a_save_that_cannot_be_put_off_does_not_need_a_slot() -> None:
    one = stage(save_timeout_s=10.0, seconds_a_look=1.0)
    one.snapshots.busy = True
    one.saving.save_now(9, INTERVAL)
    assert (one.snapshots.began, one.checkpointer.saved) == ([], [9])


def test_what_is_being_sent_keeps_its_slot_until_it_has_arrived_or_failed() -> None:
    one = stage(snapshot_every_steps=1, rounds=Rounds())
    for step in range(1, 8):
        one.step(step)
    assert one.link.sent == [1]
    assert one.snapshots.spared[-1] == (None, 1)
    # The slot of step 1 is left alone, and the other one is used again and again.
    assert {place for place, *_ in one.snapshots.began[1:]} == {1}
    one.link.sends = (False, True)
    one.step(8)
    # It failed: the next one has nothing to be kept with.
    _, second = one.link.sent
    assert one.snapshots.spared[-1] == (None, second)
    one.link.sends = (False, False)
    one.step(9)
    one.step(10)
    assert one.snapshots.spared[-1] == (second, one.link.sent[2])


STOP = cast(SaveReason, "stop")


def test_without_a_deadline_storage_is_waited_for_and_peers_are_not() -> None:
    one = stage(rounds=Rounds())
    one.link.news = [lambda: None, lambda: one.link.saved.append(Saved(9, "step-9", 8))]
    assert one.saving.save_now(9, STOP) == Reached(9, "storage")
    assert one.link.sent == [None]
    assert one.snapshots.spared[-1] == ()


def test_storage_is_waited_for_as_long_as_there_is_time() -> None:
    one = stage()
    one.left[0] = 3.0
    one.link.news = [lambda: None, lambda: one.link.saved.append(Saved(9, "step-9", 8))]
    assert one.saving.save_now(9, STOP) == Reached(9, "storage")


@pytest.mark.parametrize(("arrives", "tier"), [((False, False), "peer"), ((True, False), "memory"), ((False, True), "memory")])
def test_out_of_time_memory_is_what_was_reached_and_the_peers_if_all_of_it_arrived(
    arrives: tuple[bool, bool], tier: str
) -> None:
    one = stage(rounds=Rounds())
    one.left[0] = 3.0
    one.link.news = [lambda: setattr(one.link, "sends", arrives), lambda: one.left.__setitem__(0, 0.0)]
    assert one.saving.save_now(9, STOP) == Reached(9, tier)  # type: ignore[arg-type]
    assert one.link.sent == [None, (9, "unpaced")]
    assert one.snapshots.began == [(0, 9, "stop")]


def test_a_request_that_comes_while_storage_is_waited_for_counts_too() -> None:
    one = stage(rounds=Rounds())
    one.link.news = [lambda: one.left.__setitem__(0, 2.0), lambda: None, lambda: one.left.__setitem__(0, -0.1)]
    assert one.saving.save_now(9, INTERVAL) == Reached(9, "memory")
    assert one.link.sent == [None, (9, "unpaced")]


def test_a_host_that_stays_does_not_wait_for_storage() -> None:
    one = stage(request=StopRequest("b leaves", 0.0, 60.0, host_stays=True))
    one.left[0] = 60.0
    assert one.saving.save_now(9, STOP) == Reached(9, "handover")
    assert one.snapshots.began == [(0, 9, "stop")]
    # It is written all the same, while the next generation trains.


@pytest.mark.parametrize(("keeps", "reached"), [((1,), "handover"), ((), "storage")])
def test_the_step_of_a_host_that_leaves_must_be_on_one_that_stays(
    keeps: tuple[int, ...], reached: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = SaveStatus(60.0, busy=(False, False), torn=(False, False))
    monkeypatch.setattr("elastictrain.train.snapshot_saving.gather_records", lambda own, *, group: [own, leaves])
    one = stage(rounds=Rounds(), keeps=keeps, request=StopRequest("b leaves", 0.0, 60.0, host_stays=True))
    one.left[0] = 60.0
    one.link.news = [lambda: setattr(one.link, "sends", (False, False)), lambda: one.link.saved.append(Saved(9, "step-9", 8))]
    assert one.saving.save_now(9, STOP) == Reached(9, reached)
    assert one.link.sent == [None, (9, "unpaced")]


def test_a_deadline_that_is_past_leaves_time_for_memory() -> None:
    one = stage()
    one.left[0] = -5.0
    assert one.saving.save_now(9, STOP) == Reached(9, "memory")
    assert one.snapshots.began == [(0, 9, "stop")]


def test_without_a_slot_an_older_step_is_what_was_reached() -> None:
    one = stage()
    one.step(2)
    one.step(4)
    one.step(5)
    one.snapshots.busy = True
    one.left[0] = -1.0
    assert one.saving.save_now(9, STOP) == Reached(4, "memory")
    one = stage()
    one.snapshots.busy = True
    one.left[0] = -1.0
    assert one.saving.save_now(9, STOP) == Reached(0, "nothing")


def test_storage_that_refuses_is_no_reason_to_leave_with_an_error_what_memory_has() -> None:
    one = stage()
    one.left[0] = 3.0
    one.link.failures = [SaveFailure(9, "503")]
    one.link.news = [lambda: one.link.failures.append(SaveFailure(9, "503"))]
    assert one.saving.save_now(9, STOP) == Reached(9, "memory")
    assert [event.in_a_row for event in one.events if isinstance(event, CheckpointFailed)] == [1, 2]


def test_storage_that_refuses_is_an_error_as_long_as_nobody_has_to_go() -> None:
    one = stage()
    one.link.failures = [SaveFailure(9, "503")]
    one.link.news = [lambda: one.link.failures.append(SaveFailure(9, "503"))]
    with pytest.raises(SavesFailingError, match="503"):
        one.saving.save_now(9, STOP)


def test_the_step_that_is_whole_on_two_hosts_stays_where_another_slot_can_be_had() -> None:
    one = stage(snapshot_every_steps=1, rounds=Rounds())
    for step in (1, 2, 3):
        one.step(step)
    one.link.sends = (False, False)
    one.step(4)
    one.step(5)
    safe = one.link.sent[0]
    (kept,) = [place for place, step, _ in one.snapshots.began if step == safe]
    one.link.saved = [Saved(9, "step-9", 8)]
    one.saving.save_now(9, STOP)
    assert one.snapshots.began[-1] == (1 - kept, 9, "stop")


def test_training_that_waits_for_its_save_does_not_try_again_when_time_is_up() -> None:
    one = stage()
    one.snapshots.unusable = "gone"
    one.checkpointer.fails = 1
    assert one.saving.save_now(8, STOP) == Reached(8, "storage")
    one.checkpointer.fails, one.left[0] = 1, -1.0
    with pytest.raises(StorageError, match="ENOENT"):
        one.saving.save_now(9, STOP)
    one.left[0] = -1.0
    assert one.saving.save_now(10, STOP) == Reached(10, "storage")


@pytest.mark.parametrize("copy_s", [0.0, 30.04, 90.0])
def test_a_slow_copy_leaves_storage_only_the_rest_of_the_limit(copy_s: float) -> None:
    one = stage(save_timeout_s=100.0)
    limits_s: list[float] = []
    began_s: list[float] = []

    def copy(timeout_s: float) -> None:
        limits_s.append(timeout_s)
        began_s.append(one.clock[0])
        one.clock[0] += copy_s

    def pass_time() -> None:
        one.clock[0] += 1.0
        one.link.news.append(pass_time)

    one.snapshots.copying = copy
    one.link.news.append(pass_time)
    with pytest.raises(SavesFailingError):
        one.saving.save_now(9, STOP)
    errors = [event.error for event in one.events if isinstance(event, CheckpointFailed)]
    assert ["100 s" in error for error in errors] == [True, True]
    # The watchdog would end the process after 100 s in this phase.
    assert limits_s == [90.0, 90.0]
    lasted_s = [end_s - begin_s for begin_s, end_s in zip(began_s, [began_s[1], one.clock[0]], strict=True)]
    assert lasted_s == [pytest.approx(90.5, abs=0.5)] * 2


def test_a_step_that_is_in_storage_already_is_not_waited_for() -> None:
    one = stage()
    one.link.saved = [Saved(9, "step-9", 8)]
    one.saving.flags(10)
    one.left[0] = 3.0
    one.link.news = [lambda: one.left.__setitem__(0, 0.0)]
    assert one.saving.save_now(9, STOP) == Reached(9, "storage")


def test_replicas_are_compared_before_every_snapshot_and_only_then() -> None:
    one = stage()
    for step in range(1, 10):
        one.step(step, reason=INTERVAL if step == 5 else None)
    assert one.comparison.begun == [step for _, step, _ in one.snapshots.began] == [2, 4, 5, 6, 8]


def test_the_last_snapshot_is_not_completed_where_replicas_differ() -> None:
    one = stage()
    one.comparison.diverge_at = 3
    with pytest.raises(ReplicasDivergedError):
        one.saving.save_now(3, "stop")
    assert (one.snapshots.began, one.snapshots.delivered) == ([(0, 3, "stop")], [])


def test_without_memory_nothing_is_written_where_replicas_differ() -> None:
    one = stage()
    one.snapshots.unusable = "the folder is gone"
    one.step(1)
    one.comparison.diverge_at = 2
    with pytest.raises(ReplicasDivergedError):
        one.saving.save_now(2, "end")
    assert (one.snapshots.began, one.checkpointer.saved) == ([], [])


@pytest.mark.parametrize("left_s", [None, 20.0])
def test_whoever_waits_long_for_storage_is_told_what_for_and_until_when(left_s: float | None) -> None:
    one = stage()
    one.left[0] = left_s

    def later(seconds: float) -> Callable[[], None]:
        def wait() -> None:
            one.clock[0] += seconds

        return wait

    one.link.news = [later(FIRST_S - 0.5), later(0.5), later(1.0), lambda: one.link.saved.append(Saved(9, "step-9", 8))]
    one.saving.save_now(9, "end")
    (told,) = one.said
    assert "step 9" in told
    assert "process 4242" in told
    # A save has 90 of 100 s here, and this run has less where it has to go.
    assert f"{(90 if left_s is None else 25) - FIRST_S:.0f} s" in told


def test_whoever_waits_long_for_a_slot_is_told_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = stage()
    one.snapshots.busy = True

    def sleep(seconds: float) -> None:
        one.clock[0] += 2.5
        one.snapshots.busy = one.clock[0] < 2 * FIRST_S

    monkeypatch.setattr("elastictrain.train.snapshot_saving.time.sleep", sleep)
    one.link.news = [lambda: one.link.saved.append(Saved(9, "step-9", 8))]
    one.saving.save_now(9, "end")
    (told,) = one.said
    assert "process 4242" in told


@pytest.mark.parametrize("broken", ["", "it ended 3 times within 60 s"])
def test_a_host_without_a_saver_says_so_and_nobody_waits_for_it(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host would wait for its files until the limit of a save, a quarter of an hour."""
    one = stage(rank=1)
    told: list[SaveStatus] = []

    def gather(own: SaveStatus, *, group: object) -> list[SaveStatus]:
        told.append(own)
        # The first host knows after two rounds that its save is durable.
        return [replace(own, saved=len(told) > 3 and not broken)]

    monkeypatch.setattr("elastictrain.train.snapshot_saving.gather_records", gather)
    one.snapshots.copying = lambda timeout_s: setattr(one.link, "broken", broken)
    if broken:
        with pytest.raises(SavesFailingError, match=broken):
            one.saving.save_now(5, STOP)
    else:
        assert one.saving.save_now(5, STOP) == Reached(5, "storage")
    assert told[2].error == broken
