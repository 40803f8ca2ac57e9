"""What a start asks storage for: as much in a run that has started 100,000 times as in one that has started 20 times."""

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin, number_of
from elastictrain.distributed.group import leave
from elastictrain.lease.chain import KEPT, LINEAGE_KEPT, Chain, LeaseClaim, StartRecord, Starts, write_newest_hint
from elastictrain.storage.store import ObjectInfo
from elastictrain.train import checks
from elastictrain.train.build import make_checkpointer
from elastictrain.train.checks import store_config
from elastictrain.train.preflight import EarlierStarts
from tests.integration.checkpoint.test_checkpointer import state_of
from tests.integration.train.test_bringup import Life, of, own_environment
from tests.unit.checkpoint.fakes import Bench, FakeStore

__all__ = ["own_environment"]

SAVED = 5
PAGE = 1000
"""Names that one request to list brings."""


class Counted(FakeStore):
    """Counts operations, by the first part of the key, and the names that lists bring."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.listed: list[tuple[str, int]] = []

    def watch(self) -> None:
        self.operations.clear()
        self.listed.clear()
        self.before = lambda operation, key: self.operations.update([operation])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.before("list", prefix)
        # Threads of the start write meanwhile.
        keys = sorted(key for key in list(self.objects) if key.startswith(f"{prefix}/"))
        self.listed.append((prefix, len(keys)))
        return iter([ObjectInfo(key, len(self.objects[key]), 0.0) for key in keys if key in self.objects])


def run_with(num_starts: int) -> Counted:
    """A run that has started so many times, with a checkpoint of the last start; none of its events is merged."""
    store = Counted()
    store_config(store, of("fake://run"))
    for number in range(max(1, num_starts - KEPT + 1), num_starts + 1):
        Chain(store).create(LeaseClaim(number, "earlier", over=True))
        Starts(store).write(StartRecord(number, f"{number:06d}-aa", 1))
    for number in range(max(1, num_starts - LINEAGE_KEPT + 1), num_starts + 1):
        Lineage(store).write(ResumeOrigin(number, f"{number:06d}-aa", min(number, 2) - 1, f"{number - 1:06d}-aa"))
    store.objects |= {f"events/{number:06d}-aa-r00000.jsonl": b"{}\n" for number in range(1, num_starts + 1)}
    write_newest_hint(store, num_starts)
    Bench(store).checkpointer(f"{num_starts:06d}-aa").save(SAVED, tensors=state_of(SAVED), state={"step": SAVED}, reason="step")
    return store


def start_once(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that rank 0 asks its run's folder for until it trains."""
    monkeypatch.setattr(checks, "open_store", lambda _: store)
    store.watch()
    life = Life(of(store.url))
    started = life.begin()
    past = EarlierStarts(store, number=number_of(started.generation.name))
    past.exit_codes()
    past.findings()
    checkpointer = make_checkpointer(started)
    result = checkpointer.restore(tensors=state_of(0), reset=lambda: None)
    assert result is not None
    assert result.step == SAVED
    for thread in threading.enumerate():
        if thread.name == "note-start":
            thread.join()
    assert started.lease is not None
    started.lease.close(give_back=True)
    life.close()
    leave(started.group)


@pytest.mark.parametrize("num_starts", [20, 100_000])
def test_a_start_lists_one_page_of_what_grows_with_starts(num_starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run_with(num_starts)
    start_once(store, monkeypatch)
    grows = [
        (prefix, count) for prefix, count in store.listed if not prefix.startswith(("checkpoints", "probe-", "launch/ends"))
    ]
    assert [prefix for prefix, _ in grows] == ["lineage"]
    assert max(count for _, count in grows) <= PAGE
    assert [prefix for prefix, _ in store.listed].count("checkpoints") == 1


def test_a_start_asks_as_much_after_100_000_starts_as_after_20(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for num_starts in (20, 100_000):
        store = run_with(num_starts)
        start_once(store, monkeypatch)
        # Removing what falls behind `KEPT` is work that each start leaves to nobody else, side by side.
        asked.append(sum(count for name, count in store.operations.items() if name in ("read", "stat", "write", "create")))
    few, many = asked
    assert many <= few + 4
