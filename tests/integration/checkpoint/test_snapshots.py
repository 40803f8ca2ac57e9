import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint import copier as copier_module
from elastictrain.checkpoint import snapshots as module
from elastictrain.checkpoint.copier import Arena, Copier
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.slot import VERSION, Slot, SnapshotFacts
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.snapshots import Snapshots
from elastictrain.errors import CheckpointError
from elastictrain.events import Event

LAYOUT = RankLayout(
    (Item("a", "float32", (5, 40), (0, 0), (5, 40)), Item("b", "int64", (), (), ()), Item("c", "float32", (70,), (0,), (70,))),
    shard_bytes=500,
)
CPU = torch.device("cpu")


@dataclass
class FakeLink:
    """A saver that needs what it is told to need."""

    announced: list[tuple[int, int, bool]] = field(default_factory=list)
    needed: set[tuple[int, int]] = field(default_factory=set)
    at_announcement: Callable[[], None] = lambda: None

    def announce(self, slot: int, step: int, *, durable: bool) -> None:
        self.at_announcement()
        self.announced.append((slot, step, durable))

    def needs(self, slot: int, step: int) -> bool:
        return (slot, step) in self.needed


@dataclass
class Taken:
    snapshots: Snapshots
    arena: Arena
    link: FakeLink
    copier: Copier
    events: list[Event]
    flushed: list[int]

    def take(self, place: int, step: int, *, reason: str = "", awaited: bool = False) -> dict[str, Tensor]:
        parts = {
            "a": torch.full((5, 40), float(step)),
            "b": torch.tensor(step),
            "c": torch.arange(70, dtype=torch.float32) + step,
        }
        self.snapshots.begin(place, step, reason=reason, parts=parts, awaited=awaited)
        return parts

    def finish(self, step: int) -> None:
        self.snapshots.deliver(step, {"step": step})
        self.snapshots.wait(step, timeout_s=10)


@contextmanager
def taking(tmp_path: Path, *, slots: int = 2, changing: frozenset[str] = frozenset()) -> Iterator[Taken]:
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=list(range(slots)), device=CPU)
    link, events, flushed = FakeLink(), [], []
    copier = Copier(LAYOUT, changing=changing, device=CPU)
    snapshots = Snapshots(
        arena,
        copier,
        cast(SaverLink, link),
        facts=SnapshotFacts(VERSION, "run", "000001-aa", 0, 1, 0, LAYOUT.digest, "c", 0.0, "", {}),
        steps=[None] * slots,
        flush_records=lambda: flushed.append(1),
        record=events.append,
    )
    arena.start()
    deadline = time.monotonic() + 10
    while arena.slots[slots - 1] is None and not arena.broken:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    try:
        yield Taken(snapshots, arena, link, copier, events, flushed)
    finally:
        snapshots.close()


def busy(taken: Taken, *, due: bool = True) -> list[bool]:
    return list(taken.snapshots.status(due=due)[0])


def test_a_snapshot_holds_the_files_as_they_will_lie_in_storage(tmp_path: Path) -> None:
    with taking(tmp_path) as taken:
        assert busy(taken) == [False, False]
        parts = taken.take(0, 7, reason="interval")
        taken.snapshots.before_update()
        # From here on the state changes.
        for part in parts.values():
            part.zero_()
        taken.finish(7)
        slot = Slot.open(f"{tmp_path}/own-r00000-s0")
        facts = slot.facts
        assert facts is not None
        assert (facts.step, facts.state, facts.reason, facts.layout) == (7, {"step": 7}, "interval", LAYOUT.digest)
        for file, base in zip(LAYOUT.template, LAYOUT.starts, strict=True):
            data = slot.data[base : base + file.size_bytes]
            assert bytes(data[: len(file.header)]) == file.header
            for placed in file.items:
                raw = bytes(data[placed.start : placed.start + placed.item.size_bytes])
                expected = {"a": torch.full((5, 40), 7.0), "b": torch.tensor(7), "c": torch.arange(70, dtype=torch.float32) + 7}
                assert raw == expected[placed.item.name].numpy().tobytes(), placed.item.name
        assert taken.link.announced == [(0, 7, True)]
        assert taken.flushed
        assert [type(event).__name__ for event in taken.events] == ["Snapshot"]


def test_records_are_flushed_before_the_snapshot_is_whole_and_it_is_free_when_it_is_announced(tmp_path: Path) -> None:
    with taking(tmp_path) as taken:
        seen: list[bool] = []

        def look() -> None:
            slot = Slot.open(f"{tmp_path}/own-r00000-s0")
            seen.append(slot.lock(shared=True) and slot.facts is not None and bool(taken.flushed))
            slot.close()

        taken.link.at_announcement = look
        busy(taken)
        taken.take(0, 3)
        taken.finish(3)
        assert seen == [True]


def test_it_is_not_whole_without_its_counters(tmp_path: Path) -> None:
    with taking(tmp_path) as taken:
        busy(taken)
        taken.take(0, 3)
        with pytest.raises(CheckpointError, match="step 3"):
            taken.snapshots.wait(3, timeout_s=0.2)
        taken.snapshots.deliver(2, {})
        assert Slot.open(f"{tmp_path}/own-r00000-s0").facts is None
        taken.finish(3)


def test_a_slot_that_was_called_free_stays_locked_through_the_next_step(tmp_path: Path) -> None:
    """What is said with one step is acted upon in the next, and meanwhile another slot may have become free."""
    with taking(tmp_path) as taken:
        busy(taken)
        for place, step in ((0, 5), (1, 10)):
            taken.take(place, step)
            taken.finish(step)
        taken.link.needed = {(0, 5)}
        assert busy(taken) == [True, False], "the saver still writes the older one, so the newest is given up"
        taken.link.needed = set()
        assert busy(taken) == [False, True]
        # The group acts on what was said first.
        taken.take(1, 12)
        taken.finish(12)
        assert Slot.open(f"{tmp_path}/own-r00000-s1").facts is not None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_saver_needs_what_was_called_free_can_be_written(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with taking(tmp_path, slots=chance.choice([2, 3])) as taken:
        said: list[bool] = []
        begun: set[int] = set()
        for step in range(1, 60):
            now = busy(taken, due=chance.random() < 0.5)
            free = [place for place, is_busy in enumerate(said) if not is_busy and place not in begun]
            begun = set()
            if free and chance.random() < 0.6:
                place = chance.choice(free)
                taken.take(place, step)
                taken.finish(step)
                begun = {place}
            said = now
            held = [(name.index, steps) for name, steps in zip(taken.arena.names, taken.snapshots.steps, strict=True)]
            taken.link.needed = {(index, step) for index, step in held if step is not None and chance.random() < 0.5}


def test_the_newest_is_only_given_up_when_nothing_else_can_be_had(tmp_path: Path) -> None:
    with taking(tmp_path) as taken:
        busy(taken)
        for place, step in ((0, 5), (1, 10)):
            taken.take(place, step)
            taken.finish(step)
        assert busy(taken) == [False, True]
        taken.link.needed = {(0, 5)}
        taken.arena.slots[0].unlock()  # type: ignore[union-attr]
        assert busy(taken, due=False) == [True, True]
        assert busy(taken, due=True) == [True, False]


def test_what_is_being_sent_is_let_go_at_once_and_not_seized_again(tmp_path: Path) -> None:
    with taking(tmp_path, slots=3) as taken:
        for place, step in enumerate((7, 8)):
            busy(taken)
            taken.take(place, step)
            taken.finish(step)
        assert busy(taken) == [False, True, False]
        slot = Slot.open(f"{tmp_path}/own-r00000-s0")
        assert not slot.lock(shared=True)
        taken.snapshots.spare((None, 7))
        assert slot.lock(shared=True), "who sends it can have it now"
        slot.unlock()
        assert busy(taken) == [True, True, False]
        assert slot.lock(shared=True)
        slot.close()
        taken.snapshots.spare((8,))
        assert busy(taken) == [False, True, False]


def test_a_slot_that_the_saver_reads_is_busy(tmp_path: Path) -> None:
    with taking(tmp_path) as taken:
        busy(taken)
        taken.take(0, 5)
        taken.finish(5)
        saver = Slot.open(f"{tmp_path}/own-r00000-s0")
        assert saver.lock(shared=True)
        assert busy(taken) == [True, False]
        taken.take(1, 6)
        taken.finish(6)
        assert busy(taken) == [True, False], "the newest, as the other is being read"
        saver.close()


def test_a_copy_that_fails_leaves_nothing_and_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with taking(tmp_path) as taken:
        busy(taken)

        def broken(*_: object) -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(copier_module, "copy_on_host", broken)
        taken.take(0, 5)
        taken.snapshots.before_update()
        with pytest.raises(CheckpointError, match="step 5"):
            taken.finish(5)
        assert taken.snapshots.status(due=True) == ((False, False), (True, True))
        assert taken.link.announced == []
        monkeypatch.undo()
        taken.take(0, 6)
        taken.finish(6)


@pytest.mark.parametrize("awaited", [False, True])
def test_the_saver_hears_of_a_durable_copy_that_fails_unless_all_ranks_do(
    awaited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the slots of the other ranks until this one has its part, or none: then it finds nothing whole."""
    with taking(tmp_path) as taken:
        busy(taken)
        monkeypatch.setattr(copier_module, "copy_on_host", lambda *_: 1 / 0)
        taken.take(0, 5, reason="interval", awaited=awaited)
        taken.snapshots.before_update()
        with pytest.raises(CheckpointError, match="step 5"):
            taken.finish(5)
        assert taken.link.announced == ([] if awaited else [(0, 5, True)])
        assert Slot.open(f"{tmp_path}/own-r00000-s0").facts is None


@pytest.mark.parametrize("ends", [True, False])
def test_memory_that_is_still_copied_to_is_not_given_back(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that writes to an address that is mapped no more ends the process."""
    monkeypatch.setattr(module, "_CLOSE_S", 5.0 if ends else 0.1)
    go_on, at_the_end = threading.Event(), []
    copy, close = copier_module.copy_on_host, Arena.close

    def slowly(*arguments: object) -> None:
        threading.Timer(0.2, go_on.set).start() if ends else None
        assert go_on.wait(10)
        copy(*arguments)  # type: ignore[arg-type]
        at_the_end.append("copied")

    monkeypatch.setattr(copier_module, "copy_on_host", slowly)
    monkeypatch.setattr(Arena, "close", lambda arena: (at_the_end.append("closed"), close(arena)))
    with taking(tmp_path) as taken:
        busy(taken)
        taken.take(0, 3)
    assert at_the_end == (["copied", "closed"] if ends else [])
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(10)
    taken.arena.close()


def test_a_record_that_fails_costs_the_record_and_not_the_snapshot(tmp_path: Path) -> None:
    """The snapshot is whole and announced by then: it has not failed, and the next ones are completed, too."""

    def refuse(_: Event) -> None:
        raise RuntimeError("the log is gone")

    with taking(tmp_path) as taken:
        taken.snapshots.record = refuse
        for place, step in ((0, 3), (1, 4)):
            busy(taken)
            taken.take(place, step, reason="interval")
            taken.finish(step)
        assert taken.link.announced == [(0, 3, True), (1, 4, True)]


def test_a_state_that_is_too_large_is_a_snapshot_less(tmp_path: Path) -> None:
    with taking(tmp_path) as taken:
        busy(taken)
        taken.take(0, 5)
        taken.snapshots.deliver(5, {"long": "x" * 20_000})
        with pytest.raises(CheckpointError, match="step 5"):
            taken.snapshots.wait(5, timeout_s=10)
        assert Slot.open(f"{tmp_path}/own-r00000-s0").facts is None


def test_an_emptied_folder_is_noticed(tmp_path: Path) -> None:
    """Some systems empty shared memory when a user logs out: what is written then is found by nobody."""
    with taking(tmp_path) as taken:
        busy(taken)
        taken.take(0, 5)
        taken.finish(5)
        for path in tmp_path.glob("own-*"):
            path.unlink()
        assert busy(taken) == [True, True]
        assert "was removed" in taken.arena.broken


def test_buffers_are_copied_before_a_forward_pass_can_change_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, copy = threading.Event(), copier_module.copy_on_host

    def late(*arguments: object) -> None:
        assert waiting.wait(10)
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(copier_module, "copy_on_host", late)
    with taking(tmp_path, changing=frozenset({"c"})) as taken:
        busy(taken)
        parts: Mapping[str, Tensor] = taken.take(0, 7)
        parts["c"].zero_()
        waiting.set()
        taken.finish(7)
        slot = Slot.open(f"{tmp_path}/own-r00000-s0")
        (base, placed) = next(
            (base, placed)
            for file, base in zip(LAYOUT.template, LAYOUT.starts, strict=True)
            for placed in file.items
            if placed.item.name == "c"
        )
        raw = bytes(slot.data[base + placed.start : base + placed.start + 280])
        assert raw == (torch.arange(70, dtype=torch.float32) + 7).numpy().tobytes()


def bits(folder: Path, index: int) -> dict[str, bytes]:
    """The tensors in a slot."""
    slot = Slot.open(f"{folder}/own-r00000-s{index}")
    found = {
        placed.item.name: bytes(slot.data[base + placed.start : base + placed.start + placed.item.size_bytes])
        for file, base in zip(LAYOUT.template, LAYOUT.starts, strict=True)
        for placed in file.items
    }
    slot.close()
    return found


def bits_of(parts: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: part.numpy().tobytes() for name, part in parts.items()}


def following(taken: Taken, *, steps: list[int | None], incarnation: str = "000002-bb") -> Taken:
    """The next generation in the same process, with the same slots."""
    link, events = FakeLink(), []
    copier = Copier(LAYOUT, changing=frozenset(), device=CPU)
    facts = replace(taken.snapshots.facts, incarnation=incarnation)
    snapshots = Snapshots(
        taken.arena, copier, cast(SaverLink, link), facts=facts, steps=steps, flush_records=lambda: None, record=events.append
    )
    return Taken(snapshots, taken.arena, link, copier, events, [])


class TestAGenerationThatEnds:
    """Its process keeps the slots, and the next one in it writes to them again."""

    def test_leaves_whole_snapshots_and_all_slots_unlocked(self, tmp_path: Path) -> None:
        with taking(tmp_path) as taken:
            for place, step in ((0, 5), (1, 6)):
                busy(taken)
                taken.take(place, step)
                taken.finish(step)
            busy(taken)
            slots = [Slot.open(f"{tmp_path}/own-r00000-s{index}") for index in (0, 1)]
            assert not all(slot.lock(shared=False) for slot in slots)
            for slot in slots:
                slot.unlock()
            taken.snapshots.stop()
            assert all(slot.lock(shared=False) for slot in slots), "the saver, or who restores, can have them"
            facts = [slot.facts for slot in slots]
            assert [one.step for one in facts if one is not None] == [5, 6]
            for slot in slots:
                slot.close()
            assert all(slot is not None for slot in taken.arena.slots), "they stay mapped"
            assert taken.arena.take_over(LAYOUT, taken.arena.names)
            taken.snapshots.stop()

    def test_a_snapshot_that_lacks_its_counters_stays_torn(self, tmp_path: Path) -> None:
        """Whether its step was good, nobody knows any more."""
        with taking(tmp_path) as taken:
            busy(taken)
            whole = taken.take(0, 5)
            taken.finish(5)
            busy(taken)
            taken.take(1, 6)
            taken.snapshots.before_update()
            taken.snapshots.stop()
            assert taken.link.announced == [(0, 5, False)]
            torn = Slot.open(f"{tmp_path}/own-r00000-s1")
            assert torn.facts is None
            assert torn.lock(shared=False)
            torn.close()
            assert bits(tmp_path, 0) == bits_of(whole)

    def test_one_that_is_being_copied_is_waited_for_and_dropped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on, copy = threading.Event(), copier_module.copy_on_host

        def slowly(*arguments: object) -> None:
            assert go_on.wait(10)
            copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(copier_module, "copy_on_host", slowly)
        with taking(tmp_path) as taken:
            busy(taken)
            taken.take(0, 5)
            taken.snapshots.deliver(5, {"step": 5})
            threading.Timer(0.1, go_on.set).start()
            taken.snapshots.stop()
            assert go_on.is_set(), "nothing writes to the slot any more"
            # To complete it, records would have to reach storage first.
            assert (taken.flushed, taken.link.announced) == ([], [])
            assert Slot.open(f"{tmp_path}/own-r00000-s0").facts is None

    def test_at_the_end_of_a_run_it_is_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on, copy = threading.Event(), copier_module.copy_on_host

        def slowly(*arguments: object) -> None:
            assert go_on.wait(10)
            copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(copier_module, "copy_on_host", slowly)
        with taking(tmp_path) as taken:
            busy(taken)
            parts = taken.take(0, 5)
            taken.snapshots.deliver(5, {"step": 5})
            threading.Timer(0.1, go_on.set).start()
            taken.snapshots.close()
            assert bits(tmp_path, 0) == bits_of(parts)
            assert Slot.open(f"{tmp_path}/own-r00000-s0").facts is not None

    def test_a_copy_that_does_not_end_keeps_the_process_from_going_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would write into a snapshot of the next generation."""
        go_on, copy = threading.Event(), copier_module.copy_on_host

        def stuck(*arguments: object) -> None:
            assert go_on.wait(10)
            copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(copier_module, "copy_on_host", stuck)
        with taking(tmp_path) as taken:
            busy(taken)
            taken.take(0, 5)
            with monkeypatch.context() as hurried:
                hurried.setattr(module, "_CLOSE_S", 0.1)
                with pytest.raises(CheckpointError):
                    taken.snapshots.stop()
            slot = Slot.open(f"{tmp_path}/own-r00000-s0")
            assert not slot.lock(shared=True), "nobody may read what is still being written"
            slot.close()
            go_on.set()

    def test_the_next_one_keeps_what_is_whole_and_writes_what_is_torn(self, tmp_path: Path) -> None:
        with taking(tmp_path) as taken:
            busy(taken)
            whole = taken.take(0, 5)
            taken.finish(5)
            busy(taken)
            taken.take(1, 6)
            taken.snapshots.before_update()
            taken.snapshots.stop()
            mapped = [id(slot) for slot in taken.arena.slots]
            second = following(taken, steps=[5, None])
            assert second.snapshots.status(due=True) == ((True, False), (False, True)), "the newest is protected"
            parts = second.take(1, 6)
            second.finish(6)
            assert (bits(tmp_path, 0), bits(tmp_path, 1)) == (bits_of(whole), bits_of(parts))
            facts = Slot.open(f"{tmp_path}/own-r00000-s1").facts
            assert facts is not None
            assert (facts.step, facts.incarnation) == (6, "000002-bb")
            assert [id(slot) for slot in taken.arena.slots] == mapped, "nothing was mapped, or locked, anew"
            second.snapshots.stop()

    @pytest.mark.parametrize("seed", range(10))
    def test_over_many_generations_each_slot_holds_the_bits_of_its_step(self, seed: int, tmp_path: Path) -> None:
        chance = random.Random(seed)
        with taking(tmp_path, slots=2) as first:
            now, step, expected = first, 0, dict[int, dict[str, Tensor]]()
            for number in range(2, 8):
                for _ in range(chance.randint(0, 4)):
                    step += 1
                    free = [place for place, is_busy in enumerate(busy(now)) if not is_busy]
                    place = chance.choice(free)
                    parts = now.take(place, step)
                    expected.pop(place, None)
                    now.snapshots.before_update()
                    if chance.random() < 0.3:
                        # The generation ends before the figures of the step are known.
                        break
                    now.finish(step)
                    expected[place] = parts
                now.snapshots.stop()
                for place in range(2):
                    facts = Slot.open(f"{tmp_path}/own-r00000-s{place}").facts
                    assert (facts is not None) == (place in expected)
                    if facts is not None:
                        assert bits(tmp_path, place) == bits_of(expected[place])
                        assert facts.step == int(expected[place]["b"])
                steps = [int(expected[place]["b"]) if place in expected else None for place in range(2)]
                now = following(first, steps=steps, incarnation=f"{number:06d}-xx")
