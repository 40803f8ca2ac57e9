"""A host is lost for good, and with it its memory: the run goes on from the replica that another host has."""

from pathlib import Path

import pytest
from hosts import torchrun
from torchruns import TINY, Run, events, losses, savers, train_warm, wait_until

from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork

STEPS = 30
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    f"train.steps={STEPS}",
    "parallel=fsdp",
    "train.eval_every_steps=0",
    # Nothing is in storage before the end.
    "checkpoint.every_steps=0",
    "checkpoint.snapshot_every_steps=4",
    "checkpoint.manifest_mb=0",
    "fault.heartbeat_s=0.2",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(train_warm(ARGUMENTS, world_size=2, folder=tmp_path_factory.mktemp("undisturbed")))


def test_a_new_host_goes_on_from_the_replica_of_a_lost_one(
    network: VirtualNetwork, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    a, b = network.add("a"), network.add("b")
    run_dir, port = tmp_path / "run", a.port()
    arguments = [*ARGUMENTS, "task.pause_s=0.1", "fault.step_timeout_s=6", f"run.dir={run_dir}"]

    def start(host: VirtualHost, number: int) -> Run:
        return torchrun(
            host,
            arguments,
            nnodes=2,
            node_rank=number,
            master=a,
            port=port,
            log=tmp_path / f"{host.name}.txt",
            rendezvous="c10d",
            max_restarts=3,
            # torchrun's agents do not tell a new one where the workers' store is, unless each group gets one of its own.
            extra_environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

    def replicated() -> set[tuple[int, int]]:
        return {(row["of_rank"], row["step"]) for row in events(run_dir, "replicated")}

    first, _ = start(a, 0), start(b, 1)
    wait_until(lambda: {(0, 12), (1, 12)} <= replicated() or {(0, 16), (1, 16)} <= replicated(), what="replicas")
    b.lose()
    newest = max(step for rank, step in replicated() if rank == 1)
    c = network.add("c")
    third = start(c, 1)
    assert first.wait(120) == 0, first.output()[-5000:]
    assert third.wait(30) == 0, third.output()[-5000:]
    resume = events(run_dir, "resume")[-1]
    assert (resume["tier"], resume["bytes"] > 0) == ("peer", True)
    assert resume["step"] >= newest >= 12
    # Until the end there was nothing in storage to be read.
    assert [row["reason"] for row in events(run_dir, "checkpoint_saved")] == ["end"]
    assert losses(run_dir) == undisturbed
    for host in (a, c):
        wait_until(lambda host=host: not savers(host.memory), timeout_s=60, what="end of the saver")
        assert not list(host.memory.iterdir())
