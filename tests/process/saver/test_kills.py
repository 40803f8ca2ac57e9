"""SIGKILL of workers, of the saver and of both at every phase of snapshot, persistence, commit and restore."""

from pathlib import Path

import pytest
from faultyruns import (
    ARGUMENTS,
    BEGIN,
    BODY,
    COMMIT,
    COMPLETE,
    COPY,
    CREATE,
    LOAD,
    NOTE_DIGESTS,
    PRUNE,
    WRITE,
    Fault,
    check_nothing_left,
    check_resumed_from_newest,
    fired,
    with_faults,
)
from torchruns import losses, torchrun, train_warm

STEPS = 60


@pytest.fixture(scope="module")
def undisturbed_worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, float]]:
    """Losses by world size."""
    found = {}
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*ARGUMENTS, "task.pause_s=0", f"train.steps={STEPS}"]
    for world_size in (1, 2):
        found[world_size] = losses(train_warm(arguments, world_size=world_size, folder=folder / str(world_size)))
    return found


WORKER_SIDE = (
    Fault(COPY, "self", "middle", nth=2),
    Fault(COMPLETE, "self", "after", nth=2),
    Fault(LOAD, "self"),
)
ONE_RANK = (
    Fault(BEGIN, "self", "after", nth=3),
    Fault(BODY, "both", "after", nth=2),
    Fault(WRITE, "saver", nth=5),
    Fault(NOTE_DIGESTS, "saver", "after"),
    Fault(CREATE, "both", "after"),
    Fault(COMMIT, "both", "after"),
    Fault(PRUNE, "both"),
)


@pytest.mark.parametrize(("world_size", "faults"), [(2, WORKER_SIDE), (1, ONE_RANK)])
def test_sigkill_at_every_phase(
    world_size: int, faults: tuple[Fault, ...], tmp_path: Path, undisturbed_worlds: dict[int, dict[int, float]]
) -> None:
    run_dir = tmp_path / "job/run"
    with torchrun(
        [*ARGUMENTS, f"train.steps={STEPS}", f"run.dir={run_dir}"],
        world_size=world_size,
        folder=run_dir.parent,
        max_restarts=len(faults),
        extra_environment=with_faults(faults, tmp_path / "faults"),
    ) as run:
        assert run.wait(400) == 0, run.output()[-6000:]
    assert fired(tmp_path / "faults") == len(faults)
    assert losses(run_dir) == undisturbed_worlds[world_size]
    check_resumed_from_newest(run_dir, tmp_path / "faults")
    check_nothing_left(tmp_path)
