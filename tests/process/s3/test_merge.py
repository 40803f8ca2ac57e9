"""Journals of events are merged in a bucket, where a log that goes on sends its newest object again."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastictrain.lease.merge import BLOCK, FINISHED_S, KEPT_STARTS, merge_finished
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.store import Store
from tests.unit.lease.made import read_events

pytestmark = pytest.mark.s3


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("events")]


def merge(store: Store) -> None:
    later_s = max(info.modified for info in store.list("events")) + FINISHED_S
    merge_finished(store, newest=BLOCK + KEPT_STARTS, now_s=later_s, goes_on=lambda: True)


def test_a_launcher_that_speaks_again_after_a_merge_loses_and_doubles_nothing(store: Store) -> None:
    lines = [json.dumps({"incarnation": f"generation-{number}", "event": "x"}).encode() for number in (1, 2, 300)]
    logs = [open_append_log(store, f"events/launcher-{name}.jsonl", flush_s=60.0) for name in "ab"]
    for log, line in zip(logs, lines, strict=False):
        log.append(line + b"\n")
        log.flush()
    merge(store)
    assert keys(store) == ["events/000001-to-000002.part-00001-launchers.jsonl"]
    logs[0].append(lines[2] + b"\n")
    for log in logs:
        log.close()
    assert keys(store)[1:] == ["events/launcher-a.part-00001.jsonl"]
    assert store.read(keys(store)[1]).splitlines() == [lines[0], lines[2]]
    for _ in range(2):
        assert list(read_events(store)) == lines
        merge(store)
    assert keys(store) == [f"events/000001-to-000002.part-0000{part}-launchers.jsonl" for part in (1, 2)]


def test_two_starts_merge_at_once(store: Store) -> None:
    lines = [b'{"number": %d}' % number for number in range(1, 21)]
    for number, line in enumerate(lines, start=1):
        store.write(f"events/{number:06d}-aa-r00000.part-00001.jsonl", line + b"\n")
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(merge, store) for _ in range(4)]:
            done.result()
    assert list(read_events(store)) == lines
    merge(store)
    assert keys(store) == ["events/000001-to-000020.part-00001-r00000.jsonl"]
