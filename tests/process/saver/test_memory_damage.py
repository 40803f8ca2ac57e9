"""Memory that is damaged, short, of another run or of another world."""

import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest
from faultyruns import (
    ARGUMENTS,
    COPY,
    STEPS,
    Fault,
    check_nothing_left,
    check_resumed_from_newest,
    fired,
    kill_everything,
    launched,
    with_faults,
)
from torchruns import alone, events, last_step, losses, savers, torchrun, wait_until

from elastictrain.checkpoint.memory.folder import look
from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, load_layout, store_digests
from elastictrain.checkpoint.memory.slot import Slot


def arguments(run_dir: Path, *more: str) -> list[str]:
    return [*ARGUMENTS, f"train.steps={STEPS}", f"run.dir={run_dir}", *more]


def run_until_killed(run_dir: Path, *more: str, world_size: int = 1, step: int = 20) -> None:
    """All is killed, the saver too: what is in memory stays there."""
    below = run_dir.parents[1]
    with launched(arguments(run_dir, "task.pause_s=0.01", *more), world_size=world_size, folder=run_dir.parent) as run:
        wait_until(lambda: last_step(run_dir) >= step, what=f"step {step}")
        kill_everything(run, *savers(below))


def slots(tmp_path: Path) -> dict[int, Path]:
    """Whole snapshots of rank 0, by step."""
    (folder,) = (tmp_path / "host-memory").glob("*/*")
    return {one.facts.step: folder / one.slot for one in look(str(folder), host=0) if one.facts.rank == 0}


def whole_step(tmp_path: Path, *, world_size: int) -> int:
    """The newest of which all ranks have a whole snapshot; -1 before the first."""
    (folder,) = (tmp_path / "host-memory").glob("*/*")
    there = [(one.facts.rank, one.facts.step) for one in look(str(folder), host=0)]
    ranks = [{step for rank, step in there if rank == one} for one in range(world_size)]
    return max(set.intersection(*ranks), default=-1)


def digest(path: Path) -> None:
    """What the saver does with a snapshot that stays; it was killed, and may not have come to it."""
    slot = Slot.hold(str(path))
    assert slot is not None
    with closing(slot):
        assert slot.facts is not None
        if load_digests(str(path), slot.facts) is None:
            layout = load_layout(str(path.parent), slot.facts.layout)
            store_digests(str(path), slot.facts, compute_digests(slot, layout))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 0x20]))


def rejected(run_dir: Path) -> list[tuple[str, str]]:
    return [(row["checkpoint"], row["file"]) for row in events(run_dir, "checkpoint_rejected")]


def test_a_flipped_bit_in_memory_and_in_storage(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    run_until_killed(run_dir)
    there = slots(tmp_path)
    newest = max(there)
    digest(there[newest])
    flip(there[newest], HEADER_BYTES + 100_000)
    stored = sorted((run_dir / "checkpoints").glob("step-*/manifest.json"))
    (shard,) = stored[-1].parent.glob("*.safetensors")
    flip(shard, 100_000)

    code, output = alone(arguments(run_dir), folder=run_dir.parent)
    assert code == 0, output
    told = rejected(run_dir)
    assert told[0] == (f"snapshot of step {newest}", there[newest].name)
    resumed = events(run_dir, "resume")[-1]
    del there[newest]
    best_stored = int(stored[-1].parent.name[5:])
    if there and max(there) >= best_stored:
        assert (resumed["step"], resumed["tier"]) == (max(there), "memory")
        assert len(told) == 1
    else:
        older = [(step, "memory") for step in there] + [(int(stored[-2].parent.name[5:]), "storage")]
        assert (resumed["step"], resumed["tier"]) == max(older, key=lambda one: one[0])
        assert told[1] == (stored[-1].parent.name, shard.name)
    assert losses(run_dir) == undisturbed
    check_nothing_left(tmp_path)


def test_all_of_memory_is_damaged(tmp_path: Path) -> None:
    """Storage is next."""
    run_dir = tmp_path / "job/run"
    run_until_killed(run_dir)
    there = slots(tmp_path)
    for path in there.values():
        flip(path, HEADER_BYTES + 5000)
    stored = max(int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob("step-*/manifest.json"))
    code, output = alone(arguments(run_dir), folder=run_dir.parent)
    assert code == 0, output
    resumed = events(run_dir, "resume")[-1]
    assert (resumed["step"], resumed["tier"]) == (stored, "storage")
    assert rejected(run_dir) == [
        (f"snapshot of step {step}", there[step].name) for step in sorted(there, reverse=True) if step >= stored
    ]
    losses(run_dir)
    check_nothing_left(tmp_path)


def test_all_of_memory_is_damaged_and_storage_has_nothing(tmp_path: Path) -> None:
    """What was read before the damage was found must leave no trace in the model that begins again."""
    run_dir = tmp_path / "job/run"
    more = ("checkpoint.every_steps=0", "parallel=fsdp")
    run_until_killed(run_dir, *more, world_size=2)
    there = slots(tmp_path)
    for path in there.values():
        flip(path, HEADER_BYTES + 5000)
    with torchrun(arguments(run_dir, *more), world_size=2, folder=tmp_path / "again") as run:
        assert run.wait(120) == 0, run.output()
    resumed = events(run_dir, "resume")[-1]
    assert (resumed["step"], resumed["tier"]) == (0, "none")
    assert sorted(name for name, _ in rejected(run_dir)) == sorted(f"snapshot of step {step}" for step in there)
    # They are the same as those before the kill, from the first one on.
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))
    check_nothing_left(tmp_path)


def test_a_flipped_bit_is_not_flushed(tmp_path: Path) -> None:
    """The saver finds it when it writes, and saves the step before it."""
    run_dir = tmp_path / "job/run"
    more = ("task.pause_s=0.02", "checkpoint.every_steps=0", "checkpoint.snapshot_every_steps=4", "train.steps=100000")
    with torchrun(arguments(run_dir, *more), world_size=1, folder=run_dir.parent) as run:
        wait_until(lambda: last_step(run_dir) >= 12, what="step 12")
        (worker,) = run.workers()

        def newest_is_digested() -> bool:
            (folder,) = (tmp_path / "host-memory").glob("*/*")
            newest = max(look(str(folder), host=0), key=lambda one: one.facts.step)
            return load_digests(f"{folder}/{newest.slot}", newest.facts) is not None

        def stopped_between_copies() -> bool:
            worker.suspend()
            if len(slots(tmp_path)) == 2:
                with suppress(AssertionError):
                    # The saver digests what stays; it may not have been told of this one.
                    wait_until(newest_is_digested, timeout_s=10, what="digests")
                    return True
            worker.resume()
            return False

        wait_until(stopped_between_copies, what="two snapshots")
        there = slots(tmp_path)
        flip(there[max(there)], HEADER_BYTES + 100_000)
        kill_everything(run)
    check_nothing_left(tmp_path)
    (saved,) = events(run_dir, "checkpoint_saved")
    assert (saved["step"], saved["reason"]) == (min(there), "flush")


def test_from_two_ranks_to_one_and_back(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    faults = tmp_path / "faults"
    hooks: dict[str, object] = {"extra_environment": with_faults([], faults)}
    for count, (world_size, step) in enumerate([(2, 10), (1, 20)]):
        with launched(
            arguments(run_dir, "task.pause_s=0.05", "checkpoint.every_steps=0"),
            world_size=world_size,
            folder=run_dir.parent,
            **hooks,
        ) as run:
            wait_until(lambda step=step: last_step(run_dir) >= step, what=f"step {step}")
            # The last step's snapshot may still be on its way on a busy machine.
            wait_until(
                lambda least=step - 2, world_size=world_size: whole_step(tmp_path, world_size=world_size) >= least,
                what=f"a snapshot of step {step - 2}",
            )
            kill_everything(run, *savers(tmp_path))
        assert len(events(run_dir, "resume")) == count + 1
    with torchrun(arguments(run_dir), world_size=2, folder=run_dir.parent, **hooks) as run:
        assert run.wait() == 0, run.output()
    resumed = check_resumed_from_newest(run_dir, faults)
    assert [row["tier"] for row in resumed] == ["none", "memory", "memory"]
    assert resumed[1]["step"] >= 8
    assert resumed[2]["step"] >= 18
    found: dict[int, float] = {}
    for row in events(run_dir, "step"):
        assert row["loss"] == pytest.approx(undisturbed[row["step"]], abs=1e-5)
        found[row["step"]] = row["loss"]
    assert sorted(found) == sorted(undisturbed)
    check_nothing_left(tmp_path)


def test_without_one_rank_of_two_memory_is_of_no_use(tmp_path: Path) -> None:
    run_dir = tmp_path / "job/run"
    run_until_killed(run_dir, world_size=2)
    stored = max(int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob("step-*/manifest.json"))
    for path in (tmp_path / "host-memory").glob("*/*/own-r00001-*"):
        path.unlink()
    code, output = alone(arguments(run_dir), folder=run_dir.parent)
    assert code == 0, output
    resumed = events(run_dir, "resume")[-1]
    assert (resumed["step"], resumed["tier"]) == (stored, "storage")
    check_nothing_left(tmp_path)


def test_another_run_of_the_same_name_finds_nothing(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Neither at its start nor later: what the old one left takes no slot from the new one's only snapshot."""
    run_dir = tmp_path / "job/run"
    run_until_killed(run_dir)
    assert slots(tmp_path)
    shutil.rmtree(run_dir)
    # Killed while its second snapshot is being copied.
    faults = [Fault(COPY, "both", "middle", nth=2)]
    environment = with_faults(faults, tmp_path / "faults")
    with torchrun(
        arguments(run_dir, "checkpoint.every_steps=0", "checkpoint.on_invalid=fresh"),
        world_size=1,
        folder=run_dir.parent,
        max_restarts=1,
        extra_environment=environment,
    ) as run:
        assert run.wait() == 0, run.output()
    assert fired(tmp_path / "faults") == 1
    first, second = events(run_dir, "resume")
    assert (first["step"], first["tier"]) == (0, "none")
    assert second["tier"] == "memory"
    assert 0 < second["step"] < 8
    assert losses(run_dir) == undisturbed
    check_nothing_left(tmp_path)


def test_a_run_that_ends_before_its_first_snapshot_keeps_the_one_before(tmp_path: Path) -> None:
    """Torchrun gives up while what is newest is of an earlier incarnation."""
    run_dir = tmp_path / "job/run"
    with torchrun(
        arguments(run_dir, "checkpoint.every_steps=0"),
        world_size=1,
        folder=run_dir.parent,
        max_restarts=1,
        extra_environment=with_faults(
            [Fault(COPY, "self", "middle", nth=4), Fault(COPY, "self", "middle")], tmp_path / "faults"
        ),
    ) as run:
        assert run.wait() == 1, run.output()
    check_nothing_left(tmp_path)
    _, second = events(run_dir, "resume")
    (saved,) = events(run_dir, "checkpoint_saved")
    assert second["tier"] == "memory"
    assert (saved["step"], saved["reason"]) == (second["step"], "flush")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.parametrize(("kilobytes", "buffers"), [(1000, 1), (300, 0)])
def test_too_little_memory(kilobytes: int, buffers: int, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    memory = tmp_path / "small"
    memory.mkdir()
    if os.system(f"mount -t tmpfs -o size={kilobytes}k none {memory} 2>/dev/null"):
        pytest.skip("no mounts here")
    try:
        run_dir = tmp_path / "job/run"
        code, output = alone(arguments(run_dir, f"checkpoint.memory_dir={memory}"), folder=run_dir.parent)
        assert code == 0, output
        (short,) = events(run_dir, "memory_short")
        assert short["buffers"] == buffers
        assert short["message"] in output
        assert losses(run_dir) == undisturbed
        assert events(run_dir, "checkpoint_saved")[-1]["step"] == STEPS
        assert bool(events(run_dir, "snapshot")) == bool(buffers)
        wait_until(lambda: not savers(tmp_path), what="the end of the saver")
        assert not list(memory.iterdir())
    finally:
        os.system(f"umount {memory}")
