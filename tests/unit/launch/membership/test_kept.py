"""What the serving host does with storage; the rest is tested through a registry, and through sockets."""

import threading
from collections.abc import Callable

import pytest

from elastictrain.errors import ObjectExistsError, TransientStorageError
from elastictrain.launch.membership.codec import encode
from elastictrain.launch.membership.kept import LINES_KEPT_S, KeptObjects
from elastictrain.launch.membership.registry import Registry
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.launch.membership.made import entry, generation

FIRST = "launch/generations/000000001.json"
LIMIT_S = 10.0


def failing(operation: str) -> Callable[[str, str], None]:
    def fail(asked: str, key: str) -> None:
        if asked == operation:
            raise TransientStorageError("away")

    return fail


def test_lines_of_launchers_that_ended_long_ago_are_dropped() -> None:
    now_s = [0.0]
    kept = KeptObjects(FakeStore(), url="kept://run", clock=lambda: now_s[0])
    registry = Registry(kept)
    registry.write_entry(entry("a"))
    registry.create(generation(1, "a"))
    now_s[0] = LINES_KEPT_S - 1.0
    registry.write_entry(entry("b"))
    assert registry.entries() == [entry("a"), entry("b")]
    now_s[0] = LINES_KEPT_S + 1.0
    assert registry.entries() == [entry("b")]
    assert registry.newest() == generation(1, "a")


def test_a_generation_that_cannot_be_saved_is_not_there() -> None:
    store = FakeStore(before=failing("create"))
    kept = KeptObjects(store, url="kept://run")
    with pytest.raises(TransientStorageError, match="away"):
        kept.create(FIRST, encode(generation(1, "a")))
    assert Registry(kept).newest() is None


def test_one_that_was_saved_although_it_seemed_to_fail_counts() -> None:
    store = FakeStore()
    kept = KeptObjects(store, url="kept://run")
    store.objects[FIRST] = encode(generation(1, "a"))
    assert not Registry(kept).create(generation(1, "b"))
    assert Registry(kept).create(generation(1, "a"))
    assert Registry(kept).newest() == generation(1, "a")


def test_storage_is_asked_for_an_old_generation_once() -> None:
    store = FakeStore({FIRST: encode(generation(1, "a"))})
    kept = KeptObjects(store, url="kept://run")
    kept.load()
    asked: list[tuple[str, str]] = []
    store.before = lambda operation, key: asked.append((operation, key))
    for _ in range(3):
        assert Registry(kept).newest() == generation(1, "a")
    assert asked == [("read", FIRST)]
    with pytest.raises(ObjectExistsError):
        kept.create(FIRST, b"")
    assert asked == [("read", FIRST)]


def test_nobody_piles_up_behind_a_store_that_stalls() -> None:
    store, gate, stalls = FakeStore(), threading.Event(), threading.Event()
    kept = KeptObjects(store, url="kept://run", patience_s=0.05)

    def stall(operation: str, key: str) -> None:
        stalls.set()
        gate.wait(LIMIT_S)

    store.before = stall
    thread = threading.Thread(target=kept.create, args=(FIRST, b"1"))
    thread.start()
    assert stalls.wait(LIMIT_S)
    with pytest.raises(TransientStorageError, match="kept://run waits for fake://run, which does not answer"):
        kept.create(FIRST, b"2")
    gate.set()
    thread.join(LIMIT_S)
    assert store.objects == {FIRST: b"1"}
