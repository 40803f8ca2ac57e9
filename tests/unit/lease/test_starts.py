import pytest

from elastictrain.lease.chain import KEPT, Chain, LeaseClaim, StartRecord, Starts, newest_record, write_newest_hint
from elastictrain.lease.holder import take
from elastictrain.storage.appendlog import last_part, part_key
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.lease.made import SECOND, Scene


class Counted(FakeStore):
    """Counts requests, and what lists bring."""

    def count(self) -> list[str]:
        asked: list[str] = []
        self.before = lambda operation, key: asked.append(f"{operation} {key}")
        return asked


def run_with(num_starts: int, *, num_events: int) -> Counted:
    store = Counted()
    for number in range(max(1, num_starts - KEPT), num_starts + 1):
        Chain(store).create(LeaseClaim(number, "first", "host1", 17, ("first",)))
        Starts(store).write(StartRecord(number, f"{number:06d}-aa", 2))
    store.objects |= {f"events/{number:06d}-aa-r00000.jsonl": b"{}\n" for number in range(num_events)}
    write_newest_hint(store, num_starts)
    return store


def start_once(store: Counted, number: int) -> list[str]:
    """What a start asks storage for by number, and what it lists."""
    scene = Scene(store)
    scene.beat("first", 1, gone=True)
    asked = store.count()
    lease = take(scene.chain, SECOND, scene.waiting(), writers=(), on_lost=lambda _: None)
    lease.close(give_back=True)
    starts = Starts(store)
    assert len(starts.last(lease.number, count=5)) == 5
    assert starts.known([f"{number:06d}-aa", f"{number:06d}-bb"]) == [f"{number:06d}-aa"]
    starts.write(StartRecord(lease.number, f"{lease.number:06d}-cc", 2))
    starts.trim(lease.number)
    return asked


def test_a_start_asks_as_little_of_a_run_that_has_started_many_times() -> None:
    few = start_once(run_with(10, num_events=10), 10)
    many = start_once(run_with(50_000, num_events=50_000), 50_000)
    removals = [one for one in many if one.startswith(("delete launch/generations", "delete launch/starts"))]
    assert not [one for one in (*few, *many) if one.startswith("list")]
    assert len(many) - len(removals) <= len(few) + 2


def test_what_no_start_needs_any_more_is_removed() -> None:
    store = run_with(KEPT + 40, num_events=0)
    for number in range(KEPT + 50):
        store.objects[f"lineage/{number:09d}-{number:06d}-aa.json"] = b"{}"
    for number in range(KEPT + 1, KEPT + 41):
        Starts(store).trim(number)
    left = sorted(key for key in store.objects if key.startswith(("launch/generations", "launch/starts")))
    assert min(int(key.split("/")[2][:9]) for key in left) == 41
    # With those of the next 16 starts one page of a list.
    assert len([key for key in store.objects if key.startswith("lineage/")]) <= 1000 - 16
    assert newest_record(store)[0] == KEPT + 40


@pytest.mark.parametrize("hint", [b"7", b"3", b"1", b"99", b"x", b"", b"-3"])
def test_the_newest_generation_is_found_from_any_hint(hint: bytes) -> None:
    store = FakeStore()
    for number in range(2, 10):
        Chain(store).create(LeaseClaim(number, "first"))
    store.objects["launch/newest.json"] = hint
    assert Chain(store).newest().number == 9


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 7, 8, 100])
def test_the_last_object_of_a_log_is_found_without_a_list(parts: int) -> None:
    store = Counted({part_key("events/a", number): b"" for number in range(1, parts + 1)})
    asked = store.count()
    assert last_part(store, "events/a") == parts
    assert len(asked) <= 16
    assert not [one for one in asked if one.startswith("list")]


def test_snapshots_of_earlier_releases_belong_to_the_run() -> None:
    names = [f"00000{number}-aa" for number in range(1, 6)]
    keys = ["events/000001-aa-r00000.jsonl", "events/000002-aa-r00000.part-00001.jsonl", "lineage/000000003-000003-aa.json"]
    store = FakeStore(dict.fromkeys(keys, b""))
    store.objects["launch/starts/000000004.json"] = b"{"
    assert Starts(store).known(names) == names[:3]
