import json

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.flush import FlushLimits, choose_flush, whole_here
from elastictrain.checkpoint.keeper.meeting import begin_key
from elastictrain.checkpoint.keeper.run_folder import still_there
from elastictrain.checkpoint.lineage import Lineage, Origin
from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.memory.place import SlotName
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.checkpoint.memory.madeslots import facts_of

BOTH = Station("000002-bb", 2, (0, 1))
SECOND = Station("000002-bb", 2, (1,))


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
    fake: FakeStore, station: Station, *found: Held, limit_s: float = 0.0, done: tuple[int, ...] = ()
) -> list[tuple[int, int, str]]:
    told = choose_flush(
        fake,
        station,
        found,
        done=done,
        limits=FlushLimits(leader_s=limit_s, storage_s=3.0),
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
    Lineage(fake).write(Origin(1, "000001-aa", 0, ""))
    Lineage(fake).write(Origin(2, "000002-bb", 2, "000001-aa"))
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
    fake.objects[begin_key("000002-bb", 4)] = json.dumps({"folder": "x"}).encode()
    assert chosen(fake, SECOND, held(4, 1), held(5, 1), limit_s=5) == [(4, 1, "000002-bb")]
    assert chosen(fake, SECOND, held(4, 1, incarnation="000001-aa"), limit_s=5) == []


def test_the_leader_of_several_hosts_takes_its_newest() -> None:
    leader = Station("000002-bb", 2, (0,))
    assert chosen(store(), leader, held(4, 0), held(5, 0)) == [(5, 0, "000002-bb")]
    assert whole_here([held(5, 0, incarnation="000001-aa")], leader) == []


def test_a_run_is_there_as_long_as_anything_of_it_is() -> None:
    assert still_there(FakeStore({"config.yaml": b""}))
    assert still_there(FakeStore({"events/000001-aa-r00000.jsonl": b""}))
    assert not still_there(FakeStore({}))
