"""Journals of finished starts become few objects, and no record is lost or there twice, whatever happens meanwhile."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from elastictrain.lease.chain import Chain, LeaseClaim, StartRecord, Starts
from elastictrain.lease.merge import BLOCK, FINISHED_S, KEPT_STARTS, LARGE_BYTES, merge_finished, parse_merged, plan_merges
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import ObjectInfo, Store
from tests.unit.checkpoint.fakes import FakeStore, KilledError
from tests.unit.lease.made import read_events

NOW_S = 10 * FINISHED_S
WRITERS = ("k00000", "r00000", "r00001")


@dataclass
class Dated(FakeStore):
    """Objects have been there for long, but for some."""

    modified: dict[str, float] = field(default_factory=dict)

    def stat(self, key: str) -> ObjectInfo:
        return self._dated(super().stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return map(self._dated, super().list(prefix))

    def _dated(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.key, info.size_bytes, self.modified.get(info.key, NOW_S if "launch/" in info.key else 0.0))


def lines_of(number: int, writer: str) -> list[bytes]:
    rows = ({"incarnation": f"{number:06d}-aa", "rank": int(writer[1:]), "step": step, "by": writer} for step in range(2))
    return [json.dumps(row).encode() for row in rows]


def fill(store: Store, numbers: range, *, writers: tuple[str, ...] = WRITERS) -> None:
    for number in numbers:
        for writer in writers:
            store.write(f"events/{number:06d}-aa-{writer}.jsonl", b"\n".join([*lines_of(number, writer), b""]))


def merge(store: Store, *, newest: int = 10 * BLOCK, goes_on: Callable[[], bool] = lambda: True) -> None:
    merge_finished(store, newest=newest, now_s=NOW_S, goes_on=goes_on)


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("events")]


def first_ranks(store: Store) -> list[bytes]:
    """As a person reads them: files whose names end alike, in the order of their names."""
    return [line for key in sorted(keys(store)) if key.endswith("-r00000.jsonl") for line in store.read(key).splitlines()]


def infos(*names: str, size: int = 100, modified: float = 0.0) -> list[ObjectInfo]:
    return [ObjectInfo(f"events/{name}.jsonl", size, modified) for name in names]


def planned(found: list[ObjectInfo], *, newest: int = 10 * BLOCK) -> dict[str, list[str]]:
    merges = plan_merges(found, launchers={"events/launcher-a": 1, "events/launcher-b": 64}, newest=newest, now_s=NOW_S)
    return {merge.key(1)[7:-6]: [key[7:-6] for key in merge.sources] for merge in merges}


def test_journals_of_a_block_are_merged_by_writer() -> None:
    found = infos("000001-aa-r00000", "000001-aa-w00000", "000064-bb-k00000.part-00001", "000064-bb-r00000", "000065-cc-r00000")
    assert planned(found) == {
        "000001-to-000064.part-00001-r00000": ["000001-aa-r00000", "000064-bb-r00000"],
        "000001-to-000064.part-00001-others": ["000001-aa-w00000", "000064-bb-k00000.part-00001"],
    }


@pytest.mark.parametrize("launcher_s", [0.0, NOW_S])
def test_journals_of_launchers_are_merged_by_themselves(launcher_s: float) -> None:
    workers = infos("000001-aa-r00000", "000002-bb-r00000")
    launchers = infos("launcher-a", "launcher-b.part-00001", "launcher-b.part-00002", modified=launcher_s)
    merged = planned([*workers, *launchers])
    assert merged["000001-to-000002.part-00001-r00000"] == ["000001-aa-r00000", "000002-bb-r00000"]
    # One of them was written to just now.
    assert ("000001-to-000064.part-00001-launchers" in merged) == (launcher_s == 0.0)


@pytest.mark.parametrize(
    ("found", "newest"),
    [
        (infos("000001-aa-r00000", "000002-bb-r00000"), BLOCK + KEPT_STARTS - 1),
        ([*infos("000001-a-r00000"), *infos("000003-c-r00000", modified=NOW_S - FINISHED_S + 1)], 10 * BLOCK),
        (infos("000001-aa-r00000", "000002-bb-r00000", size=LARGE_BYTES), 10 * BLOCK),
        (infos("000001-aa-r00000"), 10 * BLOCK),
        (infos("launcher-c", "launcher-d", "notes", "000001-aa", "sub/000001-aa-r00000", "x-r00000"), 10 * BLOCK),
    ],
)  # fmt: skip
def test_what_may_still_grow_is_large_or_is_no_journal_stays(found: list[ObjectInfo], newest: int) -> None:
    assert planned(found, newest=newest) == {}


@pytest.mark.parametrize("name", ["000001-to-000064.part-00001-r00000", "000065-to-000066.part-00002-others"])
def test_merged_objects_are_of_one_block(name: str) -> None:
    assert parse_merged(f"events/{name}.jsonl") is not None
    # A name from outside that claims to hold all starts.
    assert parse_merged(f"events/{name.replace('-to-0000', '-to-9000')}.jsonl") is None
    assert parse_merged(f"events/{name}") is None


def test_a_large_log_stays_in_its_place() -> None:
    small = infos(*(f"{number:06d}-aa-{writer}" for number in (1, 2, 4, 5) for writer in ("r00000", "r00001")))
    large = infos("000003-aa-r00000.part-00001", "000003-aa-r00000.part-00002", size=LARGE_BYTES // 2)
    others = infos("000003-aa-r00001", "000003-aa-r00002")
    assert [key for key in planned([*small, *large, *others]) if key.endswith("r00000")] == [
        "000001-to-000002.part-00001-r00000",
        "000004-to-000005.part-00001-r00000",
    ]
    assert planned([*small, *large, *others])["000003-to-000003.part-00001-others"] == ["000003-aa-r00001", "000003-aa-r00002"]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_merged_run_reads_as_before(tmp_path: Path, kind: str) -> None:
    store = open_store(str(tmp_path / "run") if kind == "local" else f"memory://{uuid4().hex}")
    fill(store, range(1, BLOCK + 6))
    store.write("events/launcher-a-1.jsonl", b'{"launcher": 1}\n')
    before, told = sorted(read_events(store)), first_ranks(store)
    assert len(before) == (BLOCK + 5) * 6 + 1
    newest = BLOCK + KEPT_STARTS
    # By the clock of this store all of it was written just now.
    written_s = max(info.modified for info in store.list())
    merge_finished(store, newest=newest, now_s=written_s, goes_on=lambda: True)
    assert len(keys(store)) == (BLOCK + 5) * 3 + 1
    merge_finished(store, newest=newest, now_s=written_s + FINISHED_S, goes_on=lambda: True)
    assert len(keys(store)) == 2 + 5 * 3 + 1
    assert sorted(read_events(store)) == before
    assert first_ranks(store) == told


def test_a_long_run_keeps_few_objects() -> None:
    store = Dated()
    fill(store, range(1, 3001), writers=("r00000",))
    merge(store, newest=3000)
    assert len(keys(store)) <= 3000 / BLOCK + KEPT_STARTS + BLOCK
    assert [json.loads(line)["incarnation"] for line in read_events(store)][::2] == [f"{n:06d}-aa" for n in range(1, 3001)]


def test_a_merge_is_cut_short_anywhere() -> None:
    def run() -> Dated:
        store = Dated()
        fill(store, range(1, 4))
        return store

    whole = run()
    operations: list[str] = []
    whole.before = lambda operation, key: operations.append(operation)
    before = sorted(read_events(run()))
    merge(whole)
    whole.before = lambda operation, key: None
    assert len(keys(whole)) == 2
    for stop_at in range(len(operations)):
        store, did = run(), iter(range(len(operations)))

        def die(operation: str, key: str, did: Iterator[int] = did, stop_at: int = stop_at) -> None:
            if next(did, len(operations)) >= stop_at:
                raise KilledError

        store.before = die
        with pytest.raises(KilledError):
            merge(store)
        store.before = lambda operation, key: None
        assert sorted(read_events(store)) == before
        merge(store)
        assert sorted(read_events(store)) == before
        assert keys(store) == keys(whole)


def test_two_merge_at_once() -> None:
    expected = Dated()
    fill(expected, range(1, 4))
    before = sorted(read_events(expected))
    operations: list[str] = []
    counting = Dated(dict(expected.objects), before=lambda operation, key: operations.append(operation))
    merge(counting)
    for meet_at in range(len(operations)):
        store, did = Dated(dict(expected.objects)), iter(range(10_000))

        def other(operation: str, key: str, store: Dated = store, did: Iterator[int] = did, meet_at: int = meet_at) -> None:
            if next(did) == meet_at:
                store.before = lambda operation, key: None
                merge(store)

        store.before = other
        merge(store)
        assert sorted(read_events(store)) == before


def test_a_record_that_comes_late_is_neither_lost_nor_doubled() -> None:
    store = Dated()
    fill(store, range(1, 4))
    late = "events/000002-aa-r00000.jsonl"

    def write_late(operation: str, key: str) -> None:
        if operation == "create" and "r00000" in key:
            store.objects[late] += b'{"late": 1}\n'

    before = list(read_events(store))
    store.before = write_late
    merge(store)
    store.before = lambda operation, key: None
    # In a bucket a writer sends the whole object again.
    store.objects["events/000001-aa-r00001.jsonl"] = b"\n".join([*lines_of(1, "r00001"), b'{"late": 2}', b'{"cut'])
    for _ in range(2):
        assert sorted(read_events(store)) == sorted([*before, b'{"late": 1}', b'{"late": 2}'])
        merge(store)
    assert all(parse_merged(key) for key in keys(store))
    assert len(keys(store)) == 4


def launched(generation: int, *, count: int = 1, begin: int = 0) -> bytes:
    rows = ({"incarnation": f"generation-{generation}", "rank": -1, "event": number} for number in range(begin, count))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_launchers_that_are_gone_are_merged_whenever_a_merge_is_cut_short() -> None:
    def run() -> Dated:
        store = Dated()
        for number in range(1, 4):
            store.objects[f"events/launcher-host.{number}.part-00001.jsonl"] = b"[]\n" + launched(number)
            store.objects[f"events/launcher-host.{number}.part-00002.jsonl"] = launched(number + 100, count=2, begin=1)
        store.objects["events/launcher-idle.jsonl"] = launched(0)
        return store

    whole, operations = run(), list[str]()
    before = sorted(read_events(whole))
    whole.before = lambda operation, key: operations.append(operation)
    merge(whole)
    whole.before = lambda operation, key: None
    assert keys(whole) == ["events/000001-to-000003.part-00001-launchers.jsonl", "events/launcher-idle.jsonl"]
    for stop_at in range(len(operations)):
        store, did = run(), iter(range(len(operations)))

        def die(operation: str, key: str, did: Iterator[int] = did, stop_at: int = stop_at) -> None:
            if next(did, len(operations)) >= stop_at:
                raise KilledError

        store.before = die
        with pytest.raises(KilledError):
            merge(store)
        store.before = lambda operation, key: None
        for _ in range(2):
            assert sorted(read_events(store)) == before
            merge(store)
        assert keys(store) == keys(whole)


def test_a_launcher_that_was_silent_for_long_goes_on_with_its_journal(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    logs = [open_append_log(store, f"events/launcher-{name}.jsonl", flush_s=60.0) for name in "ab"]
    for number, log in enumerate(logs, start=1):
        log.append(launched(number))
    later_s = max(info.modified for info in store.list()) + FINISHED_S
    for _ in range(2):
        merge_finished(store, newest=10 * BLOCK, now_s=later_s, goes_on=lambda: True)
        assert len(keys(store)) == 1
    logs[0].append(launched(700))
    assert keys(store) == ["events/000001-to-000002.part-00001-launchers.jsonl", "events/launcher-a.jsonl"]
    assert sorted(read_events(store)) == sorted(launched(number)[:-1] for number in (1, 2, 700))
    for log in logs:
        log.close()


def test_lines_that_are_no_records_are_kept_and_cut_ones_left_out() -> None:
    store = Dated()
    store.objects["events/000001-aa-r00000.jsonl"] = b'\xff\r\n\n[]\n{"cut'
    store.objects["events/000002-aa-r00000.jsonl"] = b'{"a": 1}\n'
    merge(store)
    assert store.objects == {"events/000001-to-000002.part-00001-r00000.jsonl": b'\xff\r\n[]\n{"a": 1}\n'}


def test_much_is_merged_into_several_objects() -> None:
    store = Dated()
    line = b"x" * (1 << 20) + b"\n"
    for number in range(1, 36):
        store.objects[f"events/{number:06d}-aa-r00000.jsonl"] = b"%d" % number + line
    told = first_ranks(store)
    merge(store)
    assert len(keys(store)) == 3
    assert max(map(len, store.objects.values())) <= 17 << 20
    assert first_ranks(store) == told


@pytest.mark.parametrize(("newest", "merges"), [(4 * BLOCK, True), (4 * BLOCK + 1, False), (16, False)])
def test_one_start_in_a_few_merges(newest: int, merges: bool) -> None:
    store = Dated()
    fill(store, range(1, 3))
    Starts(store).write(StartRecord(newest, f"{newest:06d}-aa", 1))
    Starts(store).merge_events(newest)
    assert (len(keys(store)) == 2) == merges


def test_a_start_that_has_a_successor_merges_nothing_more() -> None:
    store = Dated()
    fill(store, range(1, BLOCK + 3))
    Starts(store).write(StartRecord(4 * BLOCK, f"{4 * BLOCK:06d}-aa", 1))

    def succeed(operation: str, key: str) -> None:
        if operation == "create" and key.startswith("events/"):
            Chain(store).create(LeaseClaim(4 * BLOCK + 1, "next"))

    store.before = succeed
    Starts(store).merge_events(4 * BLOCK)
    assert len([key for key in keys(store) if parse_merged(key)]) == 1


def test_numbers_go_on_from_merged_events() -> None:
    store = Dated()
    fill(store, range(1, 6))
    merge(store)
    assert Chain(store).last_number(LeaseClaim(0, "", over=True)) == 5


def test_a_start_merges_a_part_of_what_a_long_run_left() -> None:
    store = Dated()
    fill(store, range(1, 4 * BLOCK + 1), writers=("r00000",))
    merge_finished(store, newest=10 * BLOCK, now_s=NOW_S, goes_on=lambda: True, most=3)
    assert len(keys(store)) == 3 + BLOCK
