"""Seconds that a start of a run waits for storage, with few and with many objects in the run's folder, merged or not.

    python scripts/bench_start.py URL [--objects 10,1000,100000]

URL is an empty folder, a path or s3://bucket/folder; what is written there is removed. The parts of a start that look at what
earlier starts have left are timed one after another, as rank 0 goes through them; then a merge of all events, of which a start
does a part while it trains; then another start.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin, number_of
from elastictrain.lease.chain import KEPT, LINEAGE_KEPT, Chain, LeaseClaim, StartRecord, Starts, write_newest_hint
from elastictrain.lease.holder import Waiting, take
from elastictrain.lease.merge import EVENTS, FINISHED_S, merge_finished
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.train.preflight import EarlierStarts

_WRITERS = 32


def fill(store: Store, num_objects: int) -> int:
    """Leave what that many starts of one rank leave, of which the records of all but the last ones have been removed."""
    first = max(1, num_objects - KEPT)
    event = b'{"event": "stop", "exit_code": 75}\n'
    with ThreadPoolExecutor(_WRITERS) as pool:

        def event_of(number: int) -> None:
            store.write(f"events/{number:06d}-aa-r00000.jsonl", event)

        def records_of(number: int) -> None:
            Chain(store).create(LeaseClaim(number, "bench", over=True))
            Starts(store).write(StartRecord(number, f"{number:06d}-aa", 1))
            if number > num_objects - LINEAGE_KEPT:
                Lineage(store).write(ResumeOrigin(number, f"{number:06d}-aa", number, f"{number - 1:06d}-aa"))

        list(pool.map(event_of, range(1, num_objects + 1)))
        list(pool.map(records_of, range(first, num_objects + 1)))
    write_newest_hint(store, num_objects)
    return num_objects


def measure(store: Store, last: int) -> dict[str, float]:
    """Seconds of each part."""
    seconds: dict[str, float] = {}

    def timed(name: str, act: Callable[[], object]) -> None:
        began = time.monotonic()
        act()
        seconds[name] = time.monotonic() - began

    name = f"{last + 1:06d}-bb"
    waiting = Waiting("stop", store.url, print)

    def take_lease() -> None:
        take(Chain(store), LeaseClaim(0, "bench"), waiting, writers=(), on_lost=print).close(give_back=True)

    timed("lease", take_lease)
    timed("how the last start ended", EarlierStarts(store, number=number_of(name)).exit_codes)
    timed("findings of earlier starts", EarlierStarts(store, number=number_of(name)).findings)
    timed("whose snapshots", lambda: Starts(store).known([f"{last:06d}-aa"]))
    timed("lineage", lambda: Lineage(store).has(f"{last:06d}-aa", last))
    return seconds


def merge(store: Store, last: int) -> str:
    """What a merge of all events takes, which are as old as they must be for that."""
    began = time.monotonic()
    later_s = time.time() + 2 * FINISHED_S
    merge_finished(store, newest=last, now_s=later_s, goes_on=lambda: True, most=last)
    seconds = time.monotonic() - began
    return f"{seconds:.1f} s, leaves {sum(1 for _ in store.list(EVENTS))} objects of events"


def show(title: str, seconds: dict[str, float]) -> None:
    """One line."""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    print(f"{title}: {sum(seconds.values()):.3f} s ({parts})", flush=True)


def clear(store: Store) -> None:
    """Remove everything."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(store.delete, [info.key for info in list(store.list())]))


def main() -> None:
    """Print three lines for each number of objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--objects", default="10,1000,100000")
    arguments = parser.parse_args()
    store = open_store(arguments.url)
    if next(iter(store.list()), None) is not None:
        parser.error(f"{arguments.url} must be an empty folder")
    try:
        for number in map(int, arguments.objects.split(",")):
            last = fill(store, number)
            show(f"{number} objects", measure(store, last))
            print(f"{number} objects, merge: {merge(store, last)}", flush=True)
            show(f"{number} objects, merged", measure(store, last + 1))
            clear(store)
    finally:
        clear(store)


if __name__ == "__main__":
    main()
