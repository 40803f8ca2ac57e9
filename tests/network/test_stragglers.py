"""Three hosts of which one is slower: the launcher leaves it out, and no step is done twice."""

from pathlib import Path

from torchruns import TINY, events

from elastictrain.chaos.fleet import LauncherFleet
from elastictrain.chaos.network.hosts import VirtualNetwork

STEPS = 260
ARGUMENTS = (
    *TINY,
    "parallel=fsdp",
    "task._target_=tests.process.lagging.LaggingLlama",
    "task.pause_s=0.04",
    "task.lags=2",
    "task.longer_s=0.06",
    f"train.steps={STEPS}",
    "train.global_batch=6",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=100",
    "fault.straggler_exclude_after=60",
    "launch.min_hosts=2",
    "launch.max_hosts=3",
    "launch.join_s=120",
    "launch.notices=false",
)


def test_a_host_that_holds_up_the_others_is_left_out(network: VirtualNetwork, tmp_path: Path) -> None:
    hosts = [network.add(name) for name in "abc"]
    fleet = LauncherFleet(tmp_path / "run", tmp_path / "logs", ARGUMENTS)
    fleet.start(*hosts)
    fleet.wait_for_step(12)
    ranks = {member["name"]: rank for rank, member in enumerate(fleet.generations()[-1]["members"])}
    slow = next(name for name, rank in ranks.items() if rank == 2)
    others = [name for name in "abc" if name != slow]
    fleet.wait_for_members(others)
    assert fleet.wait() == dict.fromkeys("abc", 0), fleet.output()[-8000:]
    found = events(fleet.run_dir, "straggler")[0]
    assert (found["of_rank"], found["host"], found["phase"]) == (2, slow, "forward")
    ended = [row for row in events(fleet.run_dir, "generation_ended") if row["exit_code"] == 69]
    assert {row["kind"] for row in ended} == {"leaving"}
    # An orderly end: the others go on from the step at which it left.
    steps = [row["step"] for row in events(fleet.run_dir, "step")]
    assert steps == list(range(1, STEPS + 1))
