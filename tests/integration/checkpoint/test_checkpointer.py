"""Saves and restores of a world of one, over a store in memory."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint.folders import BEGUN_KEY, COMMITTED_KEY, RUN_COMMITTED_KEY
from elastictrain.checkpoint.safetensors_format import BY_NAME
from elastictrain.checkpoint.tensor_bytes import dtype_named
from elastictrain.errors import (
    CheckpointError,
    ConfigError,
    NoValidCheckpointError,
    ObjectExistsError,
    StorageFullError,
    TransientStorageError,
)
from elastictrain.events import CheckpointRejected, CheckpointSaved, CheckpointsPruned
from tests.unit.checkpoint.fakes import Bench, KilledError

FOLDER = "checkpoints/step-{:09d}/"


def state_of(value: float) -> dict[str, Tensor]:
    """Enough for several shard files at `shard_mb` = 0.014."""
    return {
        "model.weight": torch.full((60, 64), value),
        "model.bias": torch.full((5,), value, dtype=torch.bfloat16),
        "optim.exp_avg": torch.full((60, 64), -value),
        "optim.step": torch.tensor(value),
        "rng.cpu.0": torch.full((7,), int(value), dtype=torch.uint8),
    }


def save(bench: Bench, step: int, **options: object) -> None:
    bench.checkpointer(shard_mb=0.014, **options).save(step, tensors=state_of(step), state={"step": step}, reason="step")


def restored_step(bench: Bench, **options: object) -> int | None:
    """The step that a start restores, checked against every tensor."""
    tensors = state_of(0)

    def reset() -> None:
        for name, value in state_of(0).items():
            tensors[name].copy_(value)

    result = bench.checkpointer("inc2", **options).restore(tensors=tensors, reset=reset)
    expected = state_of(0 if result is None else result.step)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    if result is not None:
        assert result.state == {"step": result.step}
        assert result.bytes >= sum(tensor.nbytes for tensor in tensors.values())
    return None if result is None else result.step


def never() -> None:
    raise AssertionError("nothing was to be undone")


def rejects(bench: Bench) -> list[CheckpointRejected]:
    return [event for event in bench.events if isinstance(event, CheckpointRejected)]


def key_ending(bench: Bench, step: int, end: str) -> str:
    return next(key for key in sorted(bench.store.objects) if key.startswith(FOLDER.format(step)) and key.endswith(end))


def test_every_dtype_and_layout_comes_back() -> None:
    bench = Bench()
    tensors = {name: torch.arange(24).reshape(2, 3, 4).to(dtype_named(name)) for name in BY_NAME if "e8m0" not in name}
    tensors |= {"e8m0": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu)}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "t": torch.randn(4, 6).t(),
        "slice": torch.randn(9, 9)[::2, 1:4],
    }
    tensors |= {"conj": torch.randn(4, dtype=torch.complex64).conj(), "grad": torch.randn(3, requires_grad=True)}
    bench.checkpointer().save(1, tensors=tensors, state={}, reason="step")
    loaded = {name: torch.empty_like(tensor).copy_(torch.zeros(tensor.shape)) for name, tensor in tensors.items()}
    bench.checkpointer().restore(tensors=loaded, reset=never)
    for name, tensor in tensors.items():
        want, have = tensor.detach().resolve_conj().contiguous(), loaded[name].detach().resolve_conj().contiguous()
        assert torch.equal(want.reshape(-1).view(torch.uint8), have.reshape(-1).view(torch.uint8)), name


def test_a_save_is_told() -> None:
    bench = Bench()
    name = bench.checkpointer().save(3, tensors=state_of(3), state={}, reason="end")
    (event,) = bench.events
    assert isinstance(event, CheckpointSaved)
    size_bytes = sum(len(data) for key, data in bench.store.objects.items() if key.endswith(".safetensors"))
    assert (event.step, event.checkpoint, event.reason, event.bytes) == (3, name, "end", size_bytes)
    assert (name, set(event.seconds)) == ("step-000000003", {"prepare", "write", "commit"})


def test_files_are_cut_and_named_by_incarnation_and_rank() -> None:
    bench = Bench()
    save(bench, 3)
    names = sorted(key.split("/")[-1] for key in bench.store.objects if key.startswith(FOLDER.format(3)))
    assert names == [
        "inc1-r00000-000.safetensors",
        "inc1-r00000-001.safetensors",
        "inc1-r00000-002.safetensors",
        "manifest.json",
    ]
    manifest = json.loads(bench.store.objects[FOLDER.format(3) + "manifest.json"])
    assert manifest["step"] == 3
    assert manifest["config_digest"] == "digest"
    assert set(manifest["versions"]) == {"elastictrain", "torch", "python"}
    assert b"pickle" not in b"".join(bench.store.objects.values())


def flip(position: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        index = int(position * (len(data) - 1))
        return data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :]

    return change


CHANGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "length of the header": ("000.safetensors", lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "text of the header": ("000.safetensors", lambda data: data[:20] + b"?" + data[21:]),
    "padding of the header": (
        "001.safetensors",
        lambda data: data.replace(b"}  ", b"}\t ", 1) if b"}  " in data else data[:-1],
    ),
    "first data": ("000.safetensors", lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:]),
    "middle of the data": ("001.safetensors", flip(0.5)),
    "last byte": ("002.safetensors", flip(1.0)),
    "file cut short": ("001.safetensors", lambda data: data[:-1]),
    "file grown": ("001.safetensors", lambda data: data + b"x"),
    "file empty": ("000.safetensors", lambda data: b""),
    "file gone": ("002.safetensors", lambda data: None),
    "file garbled": ("000.safetensors", lambda data: bytes(len(data))),
    "manifest flipped": ("manifest.json", flip(0.4)),
    "manifest cut short": ("manifest.json", lambda data: data[: len(data) // 2]),
    "manifest empty": ("manifest.json", lambda data: b""),
    "manifest garbled": ("manifest.json", lambda data: bytes(range(256))),
    "manifest gone": ("manifest.json", lambda data: None),
    "part flipped": ("part.json", flip(0.4)),
    "part cut short": ("part.json", lambda data: data[:-1]),
    "part empty": ("part.json", lambda data: b""),
    "part garbled": ("part.json", lambda data: bytes(len(data))),
    "part gone": ("part.json", lambda data: None),
}
CASES = [(name, mb) for name, (end, _) in CHANGES.items() for mb in (4.0, 0.0) if not mb or end != "part.json"]


@pytest.mark.parametrize("on_invalid", ["stop", "fresh"])
@pytest.mark.parametrize(("name", "manifest_mb"), CASES)
def test_damage_is_rejected_by_name_and_the_previous_one_used(name: str, manifest_mb: float, on_invalid: str) -> None:
    end, change = CHANGES[name]
    bench = Bench()
    save(bench, 1, manifest_mb=manifest_mb)
    save(bench, 2, manifest_mb=manifest_mb)
    key = key_ending(bench, 2, end)
    before = bench.store.objects[key]
    damaged = change(before)
    assert damaged != before
    if damaged is None:
        del bench.store.objects[key]
    else:
        bench.store.objects[key] = damaged
    kept = set(bench.store.objects)
    assert restored_step(bench, on_invalid=on_invalid) == 1
    (event,) = rejects(bench)
    assert (event.checkpoint, event.file) == ("step-000000002", key.split("/")[-1])
    assert key.split("/")[-1] in event.reason
    assert kept <= set(bench.store.objects)
    # The next start does not read it again.
    bench.events.clear()
    reads: list[str] = []
    bench.store.before = lambda operation, key: reads.append(key) if operation == "read" else None
    assert restored_step(bench, on_invalid=on_invalid) == 1
    assert not any("step-000000002" in key for key in reads)


def test_the_part_of_another_step_is_rejected() -> None:
    bench = Bench()
    save(bench, 11, manifest_mb=0)
    save(bench, 12, manifest_mb=0)
    old, new = (key_ending(bench, step, "part.json") for step in (11, 12))
    assert len(bench.store.objects[old]) == len(bench.store.objects[new])
    bench.store.objects[new] = bench.store.objects[old]
    assert restored_step(bench) == 11
    assert [event.file for event in rejects(bench)] == [new.split("/")[-1]]


def test_retention_reads_no_part() -> None:
    bench = Bench()
    for step in (1, 2):
        save(bench, step, manifest_mb=0)
    reads: list[str] = []
    bench.store.before = lambda operation, key: reads.append(key) if operation == "read" else None
    save(bench, 3, manifest_mb=0, keep_last=2)
    assert bench.folders() == {"step-000000002", "step-000000003"}
    assert [key for key in reads if key.endswith("part.json")] == [key_ending(bench, 3, "part.json")], "what was written"
    assert any("000000002/manifest.json" in key for key in reads)


@pytest.mark.parametrize("survived", ["same", "other"])
def test_a_part_that_is_there_is_taken_if_it_is_the_same(survived: str) -> None:
    bench, parts = Bench(), []
    save(bench, 1, manifest_mb=0)
    key = key_ending(bench, 1, "part.json")
    part = bench.store.objects[key]

    def late(operation: str, key: str) -> None:
        """A saver that was killed had written it."""
        if operation == "create" and key.endswith("part.json"):
            bench.store.objects[key] = part if survived == "same" else part + b" "
            parts.append(key)

    bench.store.objects = {}
    bench.store.before = late
    if survived == "same":
        save(bench, 1, manifest_mb=0)
        assert parts == [key]
        assert restored_step(bench) == 1
    else:
        with pytest.raises(ObjectExistsError):
            save(bench, 1, manifest_mb=0)
        assert not bench.folders()


def test_a_folder_that_was_moved_is_rejected() -> None:
    bench = Bench()
    save(bench, 1)
    for key in list(bench.store.objects):
        bench.store.objects[key.replace("000000001", "000000002")] = bench.store.objects[key]
    assert restored_step(bench) == 1
    assert "step 1" in rejects(bench)[0].reason


def spoil_all(bench: Bench) -> None:
    save(bench, 1)
    save(bench, 2)
    save(bench, 3)
    bench.store.objects[key_ending(bench, 1, "000.safetensors")] = b""
    bench.store.objects[key_ending(bench, 2, "manifest.json")] = b"{"
    del bench.store.objects[key_ending(bench, 3, "manifest.json")]


def test_all_invalid_refuses_with_each_reason_and_deletes_nothing() -> None:
    bench = Bench()
    spoil_all(bench)
    before = set(bench.store.objects)
    for _ in range(2):
        with pytest.raises(NoValidCheckpointError) as caught:
            restored_step(bench)
        message = str(caught.value)
        assert caught.value.exit_code == 74
        assert "checkpoint.on_invalid=fresh" in message
        assert "000.safetensors" in message
        assert "garbled" in message
        assert "step-000000003: manifest.json" in message
        assert message.count("garbled") == 1
        assert before <= set(bench.store.objects)


def test_all_invalid_and_told_to_start_over() -> None:
    bench = Bench()
    spoil_all(bench)
    before = set(bench.store.objects)
    assert restored_step(bench, on_invalid="fresh") is None
    assert {event.checkpoint for event in rejects(bench)} == {f"step-{step:09d}" for step in (1, 2, 3)}
    assert before - {COMMITTED_KEY, RUN_COMMITTED_KEY} <= set(bench.store.objects)
    save(bench, 1)
    assert restored_step(bench) == 1
    assert "step-000000001-2" in bench.folders()


def test_starting_over_begins_with_first_values_even_when_damage_is_found_late() -> None:
    bench = Bench()
    save(bench, 1)
    key = key_ending(bench, 1, "002.safetensors")
    bench.store.objects[key] = flip(1.0)(bench.store.objects[key])
    assert restored_step(bench, on_invalid="fresh") is None


def test_a_first_save_that_was_killed_is_no_lost_checkpoint() -> None:
    bench = Bench()
    assert restored_step(bench) is None
    assert BEGUN_KEY in bench.store.objects

    def kill(operation: str, key: str) -> None:
        if operation == "create":
            raise KilledError

    bench.store.before = kill
    with pytest.raises(KilledError):
        save(bench, 5)
    bench.store.before = lambda operation, key: None
    assert restored_step(bench) is None
    assert [event.checkpoint for event in rejects(bench)] == ["step-000000005"]
    bench.checkpointer("another").save(5, tensors=state_of(5), state={"step": 5}, reason="step")
    assert BEGUN_KEY not in bench.store.objects
    assert restored_step(bench) == 5
    del bench.store.objects[key_ending(bench, 5, "manifest.json")]
    with pytest.raises(NoValidCheckpointError):
        restored_step(bench)


@pytest.mark.parametrize("operation", ["list", "read"])
def test_a_store_that_fails_for_now_condemns_nothing(operation: str) -> None:
    bench = Bench()
    save(bench, 1)
    save(bench, 2)
    for nth in range(1 if operation == "list" else 6):
        seen = []

        def fail(done: str, key: str, nth: int = nth, seen: list[str] = seen) -> None:
            if done == operation:
                seen.append(key)
                if len(seen) > nth:
                    raise TransientStorageError(f"{key}: 503")

        bench.store.before = fail
        with pytest.raises(TransientStorageError, match="503"):
            restored_step(bench)
        assert rejects(bench) == []
    bench.store.before = lambda operation, key: None
    assert restored_step(bench) == 2


def test_bytes_garbled_on_the_way_are_read_again(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    save(bench, 1)
    whole = bench.store.read_into
    garbled = []

    def read_into(key: str, buffer: memoryview, *, start: int = 0) -> int:
        count = whole(key, buffer, start=start)
        if not garbled:
            garbled.append(key)
            buffer[0] ^= 1
        return count

    bench.store.read_into = read_into  # type: ignore[method-assign]
    assert restored_step(bench) == 1
    assert rejects(bench) == []
    assert "a second read returned the right bytes" in caplog.text


def test_another_model_is_named_and_nothing_is_quarantined() -> None:
    bench = Bench()
    save(bench, 1)
    other = {**state_of(0), "model.weight": torch.zeros(3), "model.extra": torch.zeros(1)}
    before = bench.files()
    with pytest.raises(ConfigError) as caught:
        bench.checkpointer().restore(tensors=other, reset=never)
    assert "model.weight" in str(caught.value)
    assert "[60, 64]" in str(caught.value)
    assert "model.extra" in str(caught.value)
    assert bench.files() == before
    assert rejects(bench) == []
    assert not other["optim.exp_avg"].any()


def test_the_same_step_is_saved_once() -> None:
    bench = Bench()
    checkpointer = bench.checkpointer()
    first = checkpointer.save(1, tensors=state_of(1), state={}, reason="step")
    again = checkpointer.save(1, tensors=state_of(1), state={}, reason="end")
    assert again == first
    assert len(bench.events) == 1
    other = bench.checkpointer("inc2").save(1, tensors=state_of(1), state={}, reason="step")
    assert other == "step-000000001-2"


def operations_of_a_save() -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    bench = prepared_bench()
    bench.store.before = lambda operation, key: seen.append((operation, key))
    save(bench, 4, keep_last=2)
    return seen


def prepared_bench() -> Bench:
    """Steps 1 to 3, a remnant at step 4, and so much kept that a save at step 4 prunes."""
    bench = Bench()
    for step in (1, 2, 3):
        save(bench, step, keep_last=3)
    bench.store.objects[FOLDER.format(4) + "old-r00000-000.safetensors"] = b"stale"
    return bench


OPERATIONS = operations_of_a_save()


@pytest.mark.parametrize("nth", range(len(OPERATIONS) + 1))
def test_killed_before_each_operation_of_a_save(nth: int) -> None:
    bench = prepared_bench()
    count = iter(range(10_000))

    def kill(operation: str, key: str) -> None:
        if next(count) >= nth:
            raise KilledError(operation, key)

    bench.store.before = kill
    committed = nth > [operation for operation, _ in OPERATIONS].index("create")
    if nth < len(OPERATIONS):
        with pytest.raises(KilledError):
            save(bench, 4, keep_last=2)
    else:
        save(bench, 4, keep_last=2)
    bench.store.before = lambda operation, key: None
    assert restored_step(bench) == (4 if committed else 3)
    save(bench, 5, keep_last=1)
    assert bench.folders() == {"step-000000005"}


@pytest.mark.parametrize("nth", range(len(OPERATIONS)))
def test_a_store_that_fails_at_each_operation_of_a_save(nth: int) -> None:
    bench = prepared_bench()
    kept = {key for key in bench.store.objects if FOLDER.format(4) not in key}
    count = iter(range(10_000))

    def fail(operation: str, key: str) -> None:
        if next(count) == nth:
            raise StorageFullError(f"{key}: no space")

    bench.store.before = fail
    created = [operation for operation, _ in OPERATIONS].index("create")
    if nth <= created + 1:
        with pytest.raises(StorageFullError, match="no space"):
            save(bench, 4, keep_last=2)
        assert kept <= set(bench.store.objects)
        if nth < created:
            assert not any("inc1" in key and "000000004" in key for key in bench.store.objects)
    else:
        save(bench, 4, keep_last=2)
    bench.store.before = lambda operation, key: None
    save(bench, 4, keep_last=2)
    assert restored_step(bench) == 4


def test_a_remnant_of_the_same_step_is_cleared_away_first() -> None:
    bench = prepared_bench()
    save(bench, 4)
    assert not any("old-r00000" in key for key in bench.store.objects)


def test_a_lost_answer_to_the_commit_is_no_failure() -> None:
    bench = Bench()
    create = bench.store.create

    def create_and_lose_the_answer(key: str, data: bytes) -> None:
        create(key, data)
        raise TransientStorageError("connection dropped")

    bench.store.create = create_and_lose_the_answer  # type: ignore[method-assign, assignment]
    save(bench, 1)
    assert restored_step(bench) == 1


def test_a_folder_that_another_run_took_is_not_committed() -> None:
    bench = Bench()

    def meddle(operation: str, key: str) -> None:
        # Files are written by several threads; the folder is listed when all are there.
        if operation == "list" and any(name.endswith("002.safetensors") for name in bench.store.objects):
            bench.store.objects.pop("checkpoints/step-000000001/inc1-r00000-001.safetensors", None)

    bench.store.before = meddle
    with pytest.raises(CheckpointError, match="another run"):
        save(bench, 1)
    assert not any(key.endswith("manifest.json") for key in bench.store.objects)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'oops'"):
        Bench().checkpointer().save(1, tensors={"oops": 3}, state={}, reason="step")  # type: ignore[dict-item]


def test_retention_deletes_and_tells() -> None:
    bench = Bench()
    for step in range(1, 7):
        save(bench, step, keep_last=2, keep_every=4)
    assert bench.folders() == {f"step-{step:09d}" for step in (4, 5, 6)}
    pruned = [event.checkpoints for event in bench.events if isinstance(event, CheckpointsPruned)]
    assert pruned == [("step-000000001",), ("step-000000002",), ("step-000000003",)]


def test_a_damaged_one_does_not_count_as_kept() -> None:
    bench = Bench()
    for step in (1, 2, 3):
        save(bench, step, keep_last=9)
    bench.store.objects[key_ending(bench, 2, "manifest.json")] = b"{"
    del bench.store.objects[key_ending(bench, 3, "001.safetensors")]
    save(bench, 4, keep_last=2)
    assert bench.folders() == {f"step-{step:09d}" for step in (1, 2, 3, 4)}
    save(bench, 5, keep_last=2)
    assert bench.folders() == {"step-000000004", "step-000000005"}


@pytest.mark.parametrize("damage", ["shorter", "longer", "gone"])
def test_files_are_counted_with_their_sizes_before_the_commit(damage: str) -> None:
    bench = Bench()

    def spoil(operation: str, key: str) -> None:
        shards = [name for name in bench.store.objects if name.endswith(".safetensors")]
        if operation == "list" and key == FOLDER.format(3)[:-1] and shards:
            whole = bench.store.objects.pop(shards[-1])
            if damage != "gone":
                bench.store.objects[shards[-1]] = whole[:-1] if damage == "shorter" else whole + b"x"
            bench.store.before = lambda operation, key: None

    bench.store.before = spoil
    with pytest.raises(CheckpointError, match=r"safetensors.*\d+ bytes"):
        save(bench, 3)
    assert not any(key.endswith("manifest.json") for key in bench.store.objects)
