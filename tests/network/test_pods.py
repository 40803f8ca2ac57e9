"""Two pods as RunAI starts them: four workers in each, one run."""

from pathlib import Path

from torchruns import TINY, events

from elastictrain.chaos.fleet import LauncherFleet
from elastictrain.chaos.network.hosts import VirtualNetwork

GPUS = 4
ARGUMENTS = (*TINY, "train.steps=3", "train.eval_every_steps=0", "launch.notices=false", "run.num_threads=1")


def test_pods_whose_world_size_counts_gpus_train_together(network: VirtualNetwork, tmp_path: Path) -> None:
    pods = [network.add(name) for name in "ab"]
    fleet = LauncherFleet(tmp_path / "run", tmp_path / "logs", ARGUMENTS)
    for rank, pod in enumerate(pods):
        fleet.start(
            pod,
            environment={
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                "RUNAI_NUM_OF_GPUS": str(GPUS),
                "PET_NNODES": str(len(pods)),
                "RANK": str(rank),
                "WORLD_SIZE": str(GPUS * len(pods)),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": pods[0].address,
                "MASTER_PORT": "29400",
            },
        )
    assert set(fleet.wait(timeout_s=120).values()) == {0}, fleet.output()[-6000:]
    (generation,) = (one for one in fleet.generations() if one["outcome"] == "run")
    assert [(member["name"], member["processes"]) for member in generation["members"]] == [("a", GPUS), ("b", GPUS)]
    (start,) = events(fleet.run_dir, "start")
    assert start["world_size"] == GPUS * len(pods)
