"""SIGKILL of a worker: torchrun restarts the group, and the run goes on as if nothing had happened."""

import random
import re
from pathlib import Path

import pytest
from torchruns import TINY, Run, events, kill, last_step, losses, torchrun, train, wait_until

STEPS = 40
ARGUMENTS = (*TINY, f"train.steps={STEPS}", "checkpoint.every_steps=5", "train.eval_every_steps=0", "fault.heartbeat_s=0.2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    # An agent that is a warm fork has imported what torchrun does not: triton, which complains when its interpreter ends.
    output = train([*ARGUMENTS, f"run.dir={folder}/run"], world_size=2, folder=folder, extra_environment={"AGENT": "cold"})
    # The end is clean: nobody complains, nothing aborts.
    assert not re.search(r"warn|abort|terminate|traceback|leaked", output, re.IGNORECASE), output
    found = losses(folder / "run")
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def starts(run_dir: Path) -> set[str]:
    return {row["incarnation"] for row in events(run_dir, "start")}


def kill_one(run: Run, run_dir: Path, *, after_step: int, num_starts: int, chance: random.Random) -> None:
    """Once a group is up that many times: one that is killed before leaves no record of its start."""
    wait_until(lambda: len(starts(run_dir)) == num_starts and last_step(run_dir) >= after_step, what=f"step {after_step}")
    victims = run.workers()
    kill(chance.choice(victims))
    wait_until(lambda: not any(victim.is_running() for victim in victims), timeout_s=15, what="end of the group")


@pytest.mark.parametrize(("rendezvous", "kills"), [("standalone", 2), ("static", 1), ("c10d", 1)])
def test_sigkill(rendezvous: str, kills: int, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    chance = random.Random(len(rendezvous))
    run_dir = tmp_path / "run"
    with torchrun(
        [*ARGUMENTS, f"run.dir={run_dir}"], world_size=2, folder=tmp_path, rendezvous=rendezvous, max_restarts=3
    ) as run:
        for number, victim_step in enumerate(sorted(chance.sample(range(2, STEPS - 4), kills)), start=1):
            kill_one(run, run_dir, after_step=victim_step, num_starts=number, chance=chance)
        assert run.wait() == 0, run.output()[-5000:]
    assert losses(run_dir) == undisturbed
    assert len(starts(run_dir)) == kills + 1
    failure = events(run_dir, "failure")
    assert failure
    assert all(row["exit_code"] == 71 and row["last_heard"] for row in failure), failure
