"""What a start leaves for later ones, and what it does about earlier ones, in the background."""

import os
import time
from pathlib import Path

from elastictrain.lease.chain import StartRecord, Starts
from elastictrain.lease.merge import FINISHED_S
from elastictrain.storage.opening import open_store
from elastictrain.train.bringup import note_start


def test_a_start_is_noted_and_merges_events_of_finished_ones(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    long_ago_s = time.time() - FINISHED_S - 60
    for number in (1, 2, 200):
        store.write(f"events/{number:06d}-aa-r00000.jsonl", b'{"number": %d}\n' % number)
        os.utime(tmp_path / f"events/{number:06d}-aa-r00000.jsonl", (long_ago_s, long_ago_s))
    note_start(store, incarnation="000256-bb", world_size=2)
    deadline_s = time.monotonic() + 10
    while len(left := sorted(path.name for path in (tmp_path / "events").iterdir())) != 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert left == ["000001-to-000002.part-00001-r00000.jsonl", "000200-aa-r00000.jsonl"]
    assert (tmp_path / "events" / left[0]).read_bytes() == b'{"number": 1}\n{"number": 2}\n'
    assert Starts(store).last(257, count=1) == [StartRecord(256, "000256-bb", 2)]
