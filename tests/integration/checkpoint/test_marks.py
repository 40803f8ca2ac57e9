"""What a run remembers of its commits: emptied folders, new beginnings, formats of other releases, files of others."""

import json
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch.distributed as dist

from elastictrain.checkpoint import checkpointer as module
from elastictrain.checkpoint import exchange
from elastictrain.checkpoint.exchange import from_first
from elastictrain.checkpoint.folders import BEGUN_KEY, COMMITTED_KEY, ROOT
from elastictrain.checkpoint.manifest import digest_of
from elastictrain.errors import CheckpointError, NoValidCheckpointError, StorageFullError, UnknownFormatError
from elastictrain.events import CheckpointSaved
from elastictrain.storage.store import ObjectInfo
from tests.integration.checkpoint.test_checkpointer import FOLDER, key_ending, rejects, restored_step, save, state_of
from tests.unit.checkpoint.fakes import Bench, KilledError, nothing


def empty(bench: Bench) -> None:
    """All checkpoint folders are lost."""
    for key in [key for key in bench.store.objects if key.count("/") == 2]:
        del bench.store.objects[key]


def test_the_first_commit_is_noted_and_never_pruned() -> None:
    bench = Bench()
    assert restored_step(bench) is None
    assert COMMITTED_KEY not in bench.store.objects
    operations: list[tuple[str, str]] = []
    bench.store.before = lambda operation, key: operations.append((operation, key))
    save(bench, 1, keep_last=1)
    assert operations.index(("write", COMMITTED_KEY)) < operations.index(("delete", BEGUN_KEY))
    noted = bench.store.objects[COMMITTED_KEY]
    assert json.loads(noted) == {"checkpoint": "step-000000001", "time": 1000.0, "incarnation": "inc1"}
    for step in (2, 3):
        save(bench, step, keep_last=1)
    assert bench.folders() == {"step-000000003"}
    assert bench.store.objects[COMMITTED_KEY] == noted


def test_checkpoints_that_are_all_gone_are_no_new_run() -> None:
    bench = Bench()
    assert restored_step(bench) is None
    save(bench, 1)
    empty(bench)
    before = bench.files()
    with pytest.raises(NoValidCheckpointError, match=r"checkpoint\.on_invalid=fresh") as caught:
        restored_step(bench)
    assert caught.value.exit_code == 74
    assert bench.files() == before


def test_starting_over_is_like_starting() -> None:
    bench = Bench()
    save(bench, 1)
    empty(bench)
    assert restored_step(bench, on_invalid="fresh") is None
    # Killed before and during its first save, it begins again without being told.
    assert restored_step(bench) is None
    bench.store.objects[FOLDER.format(1) + "inc2-r00000-000.safetensors"] = b"cut short"
    assert restored_step(bench) is None
    save(bench, 1)
    assert restored_step(bench) == 1
    empty(bench)
    with pytest.raises(NoValidCheckpointError):
        restored_step(bench)


@pytest.mark.parametrize("over", [False, True], ids=["first start", "started over"])
def test_killed_before_each_operation_of_a_first_save(over: bool) -> None:
    nth, finished = 0, False
    while not finished:
        bench = Bench()
        if over:
            save(bench, 1)
            empty(bench)
        assert restored_step(bench, on_invalid="fresh") is None
        count = iter(range(10_000))

        def kill(operation: str, key: str, nth: int = nth, count: Iterator[int] = count) -> None:
            if next(count) >= nth:
                raise KilledError(operation, key)

        bench.store.before = kill
        try:
            save(bench, 5)
            finished = True
        except KilledError:
            nth += 1
        bench.store.before = nothing
        there = FOLDER.format(5) + "manifest.json" in bench.store.objects
        assert there or COMMITTED_KEY not in bench.store.objects
        assert restored_step(bench) == (5 if there else None)
        if there:
            # The start has noted it, if the save could not.
            empty(bench)
            with pytest.raises(NoValidCheckpointError):
                restored_step(bench)
    assert nth > 10


def test_a_mark_that_cannot_be_written_fails_no_save_and_is_written_with_the_next() -> None:
    bench = Bench()
    assert restored_step(bench) is None

    def full(operation: str, key: str) -> None:
        if key == COMMITTED_KEY:
            raise StorageFullError("no space")

    bench.store.before = full
    save(bench, 1, keep_last=1)
    save(bench, 2, keep_last=1)
    assert BEGUN_KEY in bench.store.objects
    assert bench.folders() == {"step-000000002"}
    bench.store.before = nothing
    save(bench, 3)
    assert COMMITTED_KEY in bench.store.objects
    assert BEGUN_KEY not in bench.store.objects


def raise_version(bench: Bench, step: int) -> None:
    key = key_ending(bench, step, "manifest.json")
    document = json.loads(bench.store.objects[key])
    del document["digest"]
    document["version"] = 3
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    signed = {**document, "digest": digest_of(text)}
    bench.store.objects[key] = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("on_invalid", ["stop", "fresh"])
def test_a_format_of_another_release_stops_the_start(on_invalid: str) -> None:
    bench = Bench()
    save(bench, 1)
    save(bench, 2)
    raise_version(bench, 2)
    before = bench.files()
    with pytest.raises(UnknownFormatError, match=r"step-000000002/manifest\.json") as caught:
        restored_step(bench, on_invalid=on_invalid)
    assert caught.value.exit_code == 74
    assert bench.files() == before
    assert rejects(bench) == []


def test_a_format_of_another_release_is_not_pruned() -> None:
    bench = Bench()
    save(bench, 1)
    raise_version(bench, 1)
    for step in (2, 3):
        save(bench, step, keep_last=1)
    assert bench.folders() == {"step-000000001", "step-000000003"}


def test_a_failed_save_leaves_the_files_of_others() -> None:
    bench = Bench()
    others = (FOLDER.format(1) + "inc10-r00000-000.safetensors", FOLDER.format(1) + "manifest.json")

    def fail(operation: str, key: str) -> None:
        if operation == "close" and key.endswith("001.safetensors"):
            bench.store.objects.update(dict.fromkeys(others, b"of another incarnation"))
            raise StorageFullError("no space")

    bench.store.before = fail
    with pytest.raises(StorageFullError):
        save(bench, 1)
    assert set(bench.store.objects) == set(others)


def test_a_remnant_that_was_committed_meanwhile_is_left_alone() -> None:
    bench = Bench()
    save(bench, 1)
    manifest = key_ending(bench, 1, "manifest.json")
    kept = set(bench.store.objects)
    whole = bench.store.list

    def lagging(prefix: str = "") -> Iterator[ObjectInfo]:
        return (info for info in whole(prefix) if info.key != manifest)

    bench.store.list = lagging  # type: ignore[method-assign]
    result = bench.checkpointer("inc2").save(1, tensors=state_of(1), state={"step": 1}, reason="step")
    assert result == "step-000000001-2"
    # Neither cleared away for the save, nor pruned after it.
    assert kept <= set(bench.store.objects)


def test_ranks_wait_until_rank_0_has_told_and_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    save(bench, 1, keep_last=1)
    inside: list[bool] = [False]
    seen: list[tuple[str, bool, bool]] = []

    def watched(act: Callable[[], bytes], *, group: dist.ProcessGroup | None) -> bytes:
        inside[0] = True
        try:
            return from_first(act, group=group)
        finally:
            inside[0] = False

    def watch(operation: str, key: str) -> None:
        if operation == "delete":
            told = sum(isinstance(event, CheckpointSaved) for event in bench.events) == 2
            seen.append((key.split("/")[1], inside[0], told))

    monkeypatch.setattr(module, "from_first", watched)
    bench.store.before = watch
    save(bench, 2, keep_last=1)
    assert set(seen) == {("step-000000001", True, True)}

    def fail(operation: str, key: str) -> None:
        watch(operation, key)
        if operation == "close" and key.endswith("002.safetensors"):
            raise CheckpointError("a fault")

    seen.clear()
    bench.store.before = fail
    with pytest.raises(CheckpointError, match="a fault"):
        save(bench, 3)
    assert {(folder, waited) for folder, waited, _ in seen} == {("step-000000003", True)}
    assert not any(key.startswith(FOLDER.format(3)) for key in bench.store.objects)
    assert list(bench.store.list(ROOT))


def test_files_that_a_saver_of_the_same_incarnation_may_still_write_are_left_alone() -> None:
    """It hangs, and training saves the same step by itself."""
    bench = Bench()
    left = FOLDER.format(1) + "inc1-r00000-000.safetensors"
    bench.store.objects[left] = b"of its saver"
    result = bench.checkpointer("inc1").save(1, tensors=state_of(1), state={"step": 1}, reason="step")
    assert result == "step-000000001-2"
    # Those of an incarnation that is gone are cleared away.
    other = FOLDER.format(2) + "inc0-r00000-000.safetensors"
    bench.store.objects[other] = b"of a dead one"
    assert bench.checkpointer("inc1").save(2, tensors=state_of(2), state={}, reason="step") == "step-000000002"
    assert other not in bench.store.objects


def test_an_interrupt_of_rank_0_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(exchange.dist, "get_rank", lambda group: 0)

    def broadcast(data: bytes, *, group: object) -> None:
        sent.append(data)

    monkeypatch.setattr(exchange, "broadcast_bytes", broadcast)

    def act() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exchange.from_first(act, group=cast(dist.ProcessGroup, object()))
    assert [data[:1] for data in sent] == [b"!"]
