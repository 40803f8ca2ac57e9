"""Replicas of which one has a flipped bit: the rank and its host are named, and nothing of that state is saved."""

from pathlib import Path

from torchruns import TINY, events, torchrun

ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.flipping.FlippingLlama",
    "train.steps=8",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=2",
    "checkpoint.snapshot_every_steps=0",
)


def diverged(arguments: tuple[str, ...], *, world_size: int, folder: Path) -> dict[str, object]:
    """How a run ends that diverges: the event; every worker's exit code is checked."""
    with torchrun(
        [*ARGUMENTS, *arguments, f"run.dir={folder}/run"], world_size=world_size, folder=folder, max_restarts=0
    ) as run:
        assert run.wait(120) == 1, run.output()[-4000:]
        output = run.output()
    codes = {row["exit_code"] for row in events(folder / "run", "failure")}
    assert codes == {70}, output[-4000:]
    (found,) = events(folder / "run", "replicas_diverged")
    return found


def committed(folder: Path) -> list[int]:
    return sorted(row["step"] for row in events(folder / "run", "checkpoint_saved"))


def test_a_flipped_bit_in_one_of_three_replicas_names_its_rank(tmp_path: Path) -> None:
    waits = ("checkpoint.buffers=0", "task.flips_on=1", "task.flips_at=4", "task.flips=parameter")
    found = diverged(waits, world_size=3, folder=tmp_path)
    assert (found["step"], found["ranks"], found["majority"]) == (4, [1], True)
    assert len(found["hosts"]) == 1  # type: ignore[arg-type]
    assert committed(tmp_path) == [2]


def test_of_two_replicas_both_are_named_and_the_next_start_resumes_before(tmp_path: Path) -> None:
    # Through snapshots, while training goes on.
    flips = ("task.flips_on=0", "task.flips_at=5", "task.flips=exp_avg")
    found = diverged(flips, world_size=2, folder=tmp_path)
    assert (found["ranks"], found["majority"]) == ([0, 1], False)
    assert found["step"] >= 5  # type: ignore[operator]
    assert all(step < 5 for step in committed(tmp_path))
    with torchrun([*ARGUMENTS, f"run.dir={tmp_path}/run"], world_size=2, folder=tmp_path / "again") as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    assert events(tmp_path / "run", "resume")[-1]["step"] < 5
    assert 8 in committed(tmp_path)


def test_copies_of_a_sharded_model_are_compared_part_by_part(tmp_path: Path) -> None:
    hsdp = ("parallel=hsdp", "parallel.shard_size=2", "checkpoint.buffers=0", "checkpoint.every_steps=100")
    flips = ("task.flips_on=3", "task.flips_at=2", "fault.compare_every_steps=3")
    found = diverged((*hsdp, *flips), world_size=4, folder=tmp_path)
    assert (found["step"], found["ranks"], found["majority"]) == (3, [1, 3], False)
    assert committed(tmp_path) == []
