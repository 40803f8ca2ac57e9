"""Which step is saved from memory, and when the saver ends."""

import json
from dataclasses import replace
from itertools import product

from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin
from elastictrain.checkpoint.memory.folder import Held, SlotName
from elastictrain.checkpoint.run_folder import still_there
from elastictrain.checkpoint.saver.commit_protocol import PENDING
from elastictrain.checkpoint.saver.final_save import (
    ALONE_S,
    SaverClients,
    choose_final_save,
    decide,
    last_with_snapshots,
    whole_here,
)
from elastictrain.checkpoint.saver.messages import HostRanks
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.checkpoint.memory.madeslots import facts_of
from tests.unit.checkpoint.saver.running import FACTS

BOTH = HostRanks("000002-bb", 2, (0, 1))
SECOND = HostRanks("000002-bb", 2, (1,))


def held(step: int, rank: int, *, incarnation: str = "000002-bb", world_size: int = 2) -> Held:
    return Held(
        0, str(SlotName("own", rank, step % 2)), facts_of(step, rank=rank, world_size=world_size, incarnation=incarnation)
    )


def store(*, committed: int | None = None, incarnations: tuple[str, ...] = ("000001-aa", "000002-bb")) -> FakeStore:
    objects = {f"events/{name}-r00000.jsonl": b"{}\n" for name in incarnations} | {"config.yaml": b""}
    if committed is not None:
        objects[f"checkpoints/step-{committed:09d}/manifest.json"] = b""
    return FakeStore(objects)


def chosen(
    fake: FakeStore, host_ranks: HostRanks, *found: Held, limit_s: float = 0.0, done: tuple[int, ...] = ()
) -> list[tuple[int, int, str]]:
    told = choose_final_save(
        fake,
        host_ranks,
        found,
        done=done,
        config=replace(FACTS, grace_s=limit_s, save_timeout_s=3.0),
        needed_no_more=lambda: False,
        clock=iter(range(99)).__next__,
        sleep=lambda _: None,
    )
    return [(one.facts.step, one.facts.rank, one.facts.incarnation) for one in told]


def test_the_newest_step_that_all_ranks_have() -> None:
    found = [held(4, 0), held(4, 1), held(5, 0)]
    assert chosen(store(), BOTH, *found) == [(4, 0, "000002-bb"), (4, 1, "000002-bb")]
    assert chosen(store(committed=3), BOTH, *found)
    assert chosen(store(committed=4), BOTH, *found) == []
    assert chosen(store(), BOTH) == []


def test_what_others_went_on_without_keeps_no_step_from_being_saved() -> None:
    """The first generation thawed after the second had gone on from step 2, and committed step 6."""
    fake = store()
    Lineage(fake).write(ResumeOrigin(1, "000001-aa", 0, ""))
    Lineage(fake).write(ResumeOrigin(2, "000002-bb", 2, "000001-aa"))
    for name in ("000001-aa-r00000-000.safetensors", "manifest.json"):
        fake.objects[f"checkpoints/step-000000006/{name}"] = b""
    assert [step for step, _, _ in chosen(fake, BOTH, held(4, 0), held(4, 1))] == [4, 4]


def test_a_step_of_two_incarnations_is_not_mixed() -> None:
    found = [held(4, 0), held(4, 1, incarnation="000001-aa")]
    assert chosen(store(), BOTH, *found) == []
    whole = [*found, held(4, 0, incarnation="000001-aa"), held(4, 1)]
    assert chosen(store(), BOTH, *whole) == [(4, 0, "000002-bb"), (4, 1, "000002-bb")]


def test_an_incarnation_that_ended_before_its_first_snapshot_takes_the_one_before_it() -> None:
    found = [held(8, rank, incarnation="000001-aa") for rank in range(2)]
    assert [step for step, _, _ in chosen(store(committed=5), BOTH, *found)] == [8, 8]
    # Also one of another world size, whose ranks are all here.
    assert chosen(store(), BOTH, held(9, 0, incarnation="000001-aa", world_size=1)) == [(9, 0, "000001-aa")]
    # But not what a deleted run of that name left.
    assert chosen(store(incarnations=("000002-bb",)), BOTH, *found) == []


def test_one_of_several_hosts_waits_for_the_leader() -> None:
    fake = store()
    assert chosen(fake, SECOND, held(4, 1), held(5, 1), limit_s=5) == []
    fake.objects[f"{PENDING}/000002-bb-000000004/begin.json"] = json.dumps({"folder": "x", "attempt": "y"}).encode()
    assert chosen(fake, SECOND, held(4, 1), held(5, 1), limit_s=5) == [(4, 1, "000002-bb")]
    assert chosen(fake, SECOND, held(4, 1, incarnation="000001-aa"), limit_s=5) == []


def test_the_leader_of_several_hosts_takes_its_newest() -> None:
    leader = HostRanks("000002-bb", 2, (0,))
    assert chosen(store(), leader, held(4, 0), held(5, 0)) == [(5, 0, "000002-bb")]
    assert whole_here([held(5, 0, incarnation="000001-aa")], leader) == []


def test_one_of_several_hosts_goes_back_to_the_incarnation_that_has_snapshots() -> None:
    """The next one has begun, with other ranks here, and was over before it took any."""
    first, second, third = (HostRanks(name, 4, ranks) for name, ranks in (("01-a", (2, 3)), ("02-b", (0, 1)), ("03-c", (2, 3))))
    found = [held(5, rank, incarnation="01-a", world_size=4) for rank in (2, 3)]
    assert last_with_snapshots([third, second, first], found) is first
    torn = held(7, 0, incarnation="02-b", world_size=4)
    assert last_with_snapshots([third, second, first], [*found, torn]) is first
    assert last_with_snapshots([third, second, first], [*found, torn, held(7, 1, incarnation="02-b", world_size=4)]) is second
    assert last_with_snapshots([third, second], []) is third


def test_a_run_is_there_as_long_as_anything_of_it_is() -> None:
    assert still_there(FakeStore({"config.yaml": b""}))
    assert still_there(FakeStore({"events/000001-aa-r00000.jsonl": b""}))
    assert not still_there(FakeStore({}))


LIFE = SaverClients(workers=1, agents=1, ever=True, age_s=1000.0, saving=False, finished=False, flushed=False)


def test_as_long_as_anybody_may_come_back() -> None:
    assert decide(LIFE) == "stay"
    assert decide(replace(LIFE, workers=0)) == "stay"
    assert decide(replace(LIFE, agents=0)) == "stay"
    assert decide(replace(LIFE, workers=0, agents=0)) == "flush"
    assert decide(replace(LIFE, workers=0, agents=0, flushed=True)) == "leave"
    assert decide(replace(LIFE, workers=0, agents=0, flushed=True, unsaved=True)) == "keep"
    assert decide(replace(LIFE, workers=0, agents=0, flushed=True, unsaved=True, finished=True)) == "leave"


def test_the_end_of_a_run() -> None:
    assert decide(replace(LIFE, finished=True)) == "stay"
    assert decide(replace(LIFE, finished=True, workers=0)) == "leave"
    assert decide(replace(LIFE, finished=True, workers=0, saving=True)) == "stay"


def test_a_saver_that_nobody_spoke_to_waits_a_while() -> None:
    alone = replace(LIFE, workers=0, agents=0, ever=False)
    assert decide(replace(alone, age_s=ALONE_S - 1)) == "stay"
    assert decide(replace(alone, age_s=ALONE_S + 1)) == "flush"


def test_a_launcher_that_leaves_has_what_is_in_memory_written_and_is_waited_for() -> None:
    asked = replace(LIFE, workers=0, asked=True)
    assert decide(replace(asked, workers=1)) == "stay"
    assert decide(asked) == "flush"
    # Host memory is given back when it is gone.
    assert decide(replace(asked, flushed=True)) == "stay"
    assert decide(replace(asked, flushed=True, asked=False)) == "stay"
    assert decide(replace(asked, flushed=True, asked=False, agents=0)) == "leave"
    # Of a saver that no worker has come to since the one before was killed.
    assert decide(replace(asked, agents=0, ever=False, age_s=1.0)) == "flush"


def test_it_never_leaves_anything_unwritten_or_anybody_alone() -> None:
    for workers, agents, ever, saving, finished, flushed, asked in product((0, 1), (0, 1), *[(False, True)] * 5):
        life = SaverClients(workers, agents, ever, 1000.0, saving, finished, flushed, asked)
        decision = decide(life)
        if decision == "leave":
            assert not workers
            assert not saving
            assert finished or (flushed and not agents and not asked)
        if decision == "flush":
            assert not any((workers, agents and not asked, saving, flushed, finished))
