"""Ranks that decide alike from what they said a step ago: no moment without a snapshot that is whole on all of them."""

import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from elastictrain.checkpoint.memory.budget import REPLICA_SLOTS
from elastictrain.checkpoint.memory.choice import Rounds, SlotBook, agreed_steps
from elastictrain.checkpoint.memory.folder import Held, SlotName, SnapshotSet, sets_to_keep, whole_sets
from elastictrain.checkpoint.memory.slot import SnapshotFacts, SnapshotId
from elastictrain.checkpoint.peers.server import choose_replica_slot
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of
from tests.unit.examples import examples


@dataclass
class Rank:
    """The slots of one simulated rank: what is whole, what is being copied, what a saver still reads."""

    num_slots: int
    chance: random.Random
    whole: list[int | None] = field(default_factory=list)
    copying: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By slot: the step, and when its copy ends."""

    read_until: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = [None] * self.num_slots
        self.read_until = [0] * self.num_slots

    def tick(self, now: int) -> None:
        for slot, (step, ends) in list(self.copying.items()):
            if now >= ends:
                self.whole[slot] = step
                self.read_until[slot] = now + self.chance.choice([0, 0, 1, 5, 30])
                del self.copying[slot]

    def notes(self, now: int) -> tuple[list[bool], list[bool]]:
        busy = [slot in self.copying or now < self.read_until[slot] for slot in range(self.num_slots)]
        return busy, [slot in self.copying or self.whole[slot] is None for slot in range(self.num_slots)]

    def begin(self, slot: int, step: int, now: int) -> None:
        self.whole[slot] = None
        self.copying[slot] = (step, now + self.chance.choice([0, 1, 2, 4]))


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("seed", range(examples(60)))
def test_a_kill_at_any_moment_finds_a_step_that_is_whole_on_all_ranks(seed: int, num_slots: int) -> None:
    chance = random.Random(f"{seed}-{num_slots}")
    ranks = [Rank(num_slots, chance) for _ in range(3)]
    book, said, ever, newest = SlotBook([None] * num_slots), None, False, -1
    every = chance.choice([1, 2, 5])
    for step in range(1, 200):
        notes = [rank.notes(step) for rank in ranks]
        if said is not None:
            book.update(
                step - 1,
                busy=[any(busy[slot] for busy, _ in said) for slot in range(num_slots)],
                torn=[any(torn[slot] for _, torn in said) for slot in range(num_slots)],
            )
        if step % every == 0 and (slot := book.choose()) is not None:
            # What a rank calls free it has locked until it is told otherwise.
            if any(step < rank.read_until[slot] or slot in rank.copying for rank in ranks):
                raise AssertionError(f"slot {slot} is still in use at step {step}")
            for rank in ranks:
                rank.begin(slot, step, step)
            book.started(slot, step)
        said = notes
        for rank in ranks:
            rank.tick(step)
        common = set.intersection(*({one for one in rank.whole if one is not None} for rank in ranks))
        ever = ever or bool(common)
        assert common or not ever, f"nothing whole at step {step}"
        newest = max(common, default=-1)
    assert newest > 100


def test_a_protected_step_stays_and_the_others_go_round() -> None:
    book = SlotBook([10, 20, 30])
    book.update(40, busy=[False] * 3, torn=[False] * 3)
    assert book.choose() == 0
    assert book.choose(protected=(10, None)) == 1
    assert book.choose(protected=(10, 20)) == 2
    assert book.choose(protected=(10, 20, 30)) is None
    assert book.newest_whole() == 30


def test_what_was_said_before_a_snapshot_says_nothing_about_it() -> None:
    book = SlotBook([10, None])
    book.update(12, busy=[False, False], torn=[False, True])
    assert book.choose() == 1
    book.started(1, 13)
    assert book.choose() is None
    book.update(13, busy=[False, False], torn=[False, False])
    assert book.newest_whole() == 10
    book.update(14, busy=[False, False], torn=[False, False])
    assert book.newest_whole() == 13
    assert book.choose() == 0


def test_rounds_of_replicas_follow_each_other() -> None:
    rounds = Rounds()
    assert rounds.next(None, at=1) is None
    assert rounds.next(10, at=12) == 10
    assert rounds.next(20, at=22) is None
    assert rounds.protected == (None, 10)
    # Said before the round began, and then by ranks that still send.
    rounds.update(12, sending=False, failed=False)
    rounds.update(13, sending=True, failed=False)
    assert rounds.under_way == 10
    rounds.update(14, sending=False, failed=False)
    assert rounds.protected == (10, None)
    assert rounds.next(10, at=15) is None
    assert rounds.next(20, at=23) == 20
    assert rounds.protected == (10, 20)
    rounds.update(24, sending=False, failed=True)
    assert rounds.protected == (10, None)
    assert rounds.next(30, at=31) == 30


def test_a_slot_keeps_what_all_ranks_have_in_it_or_have_replicas_of() -> None:
    def held(rank: int, step: int, kind: str) -> Held:
        return Held(rank, str(SlotName(kind, rank, 0)), facts_of(step, rank=rank, world_size=2))

    def agreed(of_ranks: list[int | None], one: SnapshotSet) -> int | None:
        (step,) = agreed_steps([[step] for step in of_ranks], sets=[one])
        return step

    both = [held(rank, 9, "own") for rank in range(2)]
    (own,) = whole_sets(both, run=RUN)
    (replicated,) = whole_sets([*both, held(1, 9, "replica")], run=RUN)
    assert agreed([9, 9], own) == 9
    assert agreed([9, 9, None], own) == 9, "the new world is larger"
    assert agreed([9, None], own) is None
    assert agreed([9], own) is None, "it is smaller"
    assert agreed([9, None], replicated) == agreed([9], replicated) == 9
    assert agreed([9, 7], replicated) is None
    assert agreed([None, None], replicated) is None
    # A rank that has it in another slot would lose it there.
    assert agreed_steps([[9, None], [None, 9]], sets=[replicated]) == [None, None]
    assert agreed_steps([[9, 7], [9, 7]], sets=[]) == [None, None]


def test_what_two_hosts_have_is_safe_also_in_another_world_whose_slots_do_not_hold_it() -> None:
    def held(rank: int, step: int, host: int, kind: str) -> Held:
        return Held(host, str(SlotName(kind, rank, 0)), facts_of(step, rank=rank, world_size=2))

    safe = [held(rank, 9, host, kind) for rank in (0, 1) for host, kind in ((rank, "own"), (1 - rank, "replica"))]
    newest = [held(rank, 12, rank, "own") for rank in (0, 1)]
    sets = sets_to_keep(whole_sets([*safe, *newest], run=RUN))
    rounds = Rounds.after(sets, incarnation="000002-bb")
    assert (rounds.safe, rounds.protected) == (("000001-aa", 9), (9, None))
    assert [rounds.next(step, at=14) for step in (9, 12, 13)] == [None, None, 13]
    rounds.update(15, sending=False, failed=True)
    assert rounds.safe == ("000001-aa", 9)
    assert rounds.next(14, at=16) == 14
    rounds.update(17, sending=False, failed=False)
    assert rounds.safe == ("000002-bb", 14)
    assert Rounds.after((), incarnation="000002-bb").safe is None


@cache
def _facts(one: SnapshotId, rank: int, world_size: int) -> SnapshotFacts:
    return facts_of(one.step, rank=rank, world_size=world_size, incarnation=one.incarnation)


@dataclass
class Hosts:
    """A rank on each simulated host: by rank and slot, its snapshots, and the replicas that the next host keeps of them."""

    num_hosts: int
    num_slots: int
    chance: random.Random
    own: list[list[SnapshotId | None]] = field(default_factory=list)
    replicas: list[list[SnapshotId | None]] = field(default_factory=list)
    copies: list[tuple[int, int, int, SnapshotId]] = field(default_factory=list)
    """When each copy ends, of which rank, into which slot, of what."""

    arrivals: list[tuple[int, int, SnapshotId, SnapshotId | None]] = field(default_factory=list)
    """When a replica arrives, of which rank and snapshot, and which one stays."""

    def __post_init__(self) -> None:
        self.own = [[None] * self.num_slots for _ in range(self.num_hosts)]
        self.replicas = [[None] * REPLICA_SLOTS for _ in range(self.num_hosts)]

    def kill_workers(self) -> None:
        self.copies, self.arrivals = [], []

    def replace(self, host: int) -> None:
        self.own[host] = [None] * self.num_slots
        self.replicas[host - 1] = [None] * REPLICA_SLOTS

    def tick(self, now: int) -> None:
        for _, rank, slot, snapshot in [one for one in self.copies if one[0] <= now]:
            self.own[rank][slot] = snapshot
        for _, rank, snapshot, safe in [one for one in self.arrivals if one[0] <= now]:
            assert snapshot in self.own[rank], "what is being sent stays in its slot"
            held = [self.facts(one, rank) for one in self.replicas[rank]]
            self.replicas[rank][choose_replica_slot(held, safe=safe)] = snapshot
        self.copies = [one for one in self.copies if one[0] > now]
        self.arrivals = [one for one in self.arrivals if one[0] > now]

    def flags(self) -> tuple[list[bool], set[int]]:
        """Which slots are busy on some rank, and where some rank lacks what it has begun."""
        return [slot in {one[2] for one in self.copies} for slot in range(self.num_slots)], {one[2] for one in self.copies}

    def begin(self, slot: int, snapshot: SnapshotId) -> None:
        for rank, slots in enumerate(self.own):
            slots[slot] = None
            self.copies.append((snapshot.step + self.chance.choice([0, 1, 2, 5]), rank, slot, snapshot))

    def send(self, snapshot: SnapshotId, safe: SnapshotId | None, *, now: int) -> None:
        for rank in range(self.num_hosts):
            self.arrivals.append((now + self.chance.choice([1, 2, 6, 20]), rank, snapshot, safe))

    def facts(self, one: SnapshotId | None, rank: int) -> SnapshotFacts | None:
        return None if one is None else _facts(one, rank, self.num_hosts)

    def whole(self, *, without: int = -1) -> tuple[SnapshotSet, ...]:
        held = []
        for rank in range(self.num_hosts):
            places = ("own", rank, self.own[rank]), ("replica", (rank + 1) % self.num_hosts, self.replicas[rank])
            for kind, host, slots in places:
                for index, one in enumerate(slots):
                    if (facts := self.facts(one, rank)) is not None and host != without:
                        held.append(Held(host, str(SlotName(kind, rank, index)), facts))
        return whole_sets(held, run=RUN)

    def newest(self, *, without: int = -1) -> int:
        return max((one.step for one in self.whole(without=without)), default=-1)


@pytest.mark.parametrize("seed", range(examples(60)))
def test_no_kill_goes_back_before_the_last_one_and_no_lost_host_before_what_is_safe(seed: int) -> None:
    """Workers are killed over and over, also before any replica of their generation has arrived, or with those of some ranks
    only; now and then a host is replaced."""
    chance = random.Random(seed)
    hosts = Hosts(chance.choice([2, 3, 4]), chance.choice([3, 4]), chance)
    safe_ever = False
    for generation in range(1, 20):
        incarnation = f"{generation:06d}-aa"
        sets = sets_to_keep(hosts.whole())
        ids = {(one.incarnation, one.step) for one in sets}
        rows = [[one.step if one is not None and one in ids else None for one in slots] for slots in hosts.own]
        steps = agreed_steps(rows, sets=sets)
        rounds, book = Rounds.after(sets, incarnation=incarnation), SlotBook(steps)
        restored, told = sets[0].step if sets else 0, None
        wholes = [[(one.incarnation, one.step) for one in hosts.whole(without=host)] for host in range(hosts.num_hosts)]
        # What is complete without each host; if there is none, the restored step is complete without some.
        least = max(
            (one.step for one in hosts.whole() if all((one.incarnation, one.step) in ids for ids in wholes)), default=-1
        )
        restored_id = (sets[0].incarnation, restored) if sets else ("", -1)
        safe = [least if least >= 0 else restored if restored_id in ids else -1 for ids in wholes]
        for step in range(restored + 1, restored + 1 + chance.choice([1, 3, 5, 8, 40])):
            if told is not None:
                busy, copying, sending = told
                torn = [one in copying or book_step is None for one, book_step in enumerate(steps)]
                book.update(step - 1, busy=busy, torn=torn)
                rounds.update(step - 1, sending=sending, failed=False)
            told = (*hosts.flags(), bool(hosts.arrivals))
            if (wanted := rounds.next(book.newest_whole(), at=step)) is not None:
                hosts.send(SnapshotId(incarnation, wanted), rounds.safe, now=step)
            if step % 2 == 0 and (slot := book.choose(protected=rounds.protected)) is not None:
                hosts.begin(slot, SnapshotId(incarnation, step))
                book.started(slot, step)
                steps[slot] = step
            hosts.tick(step)
            assert hosts.newest() >= restored or not sets, f"killed after step {step} of generation {generation}"
            for host, before in enumerate(safe):
                left = hosts.newest(without=host)
                assert left >= before, f"host {host} lost after step {step} of generation {generation}"
                if rounds.safe is not None and rounds.safe.incarnation == incarnation:
                    safe[host] = max(before, rounds.safe.step)
        safe_ever = safe_ever or min(safe) > 0
        hosts.kill_workers()
        if min(safe) > 0 and chance.random() < 0.3:
            hosts.replace(chance.randrange(hosts.num_hosts))
    assert safe_ever
