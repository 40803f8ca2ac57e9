"""SIGKILL of savers, and of everything on a host, while replicas are being sent and received."""

import sys
from pathlib import Path

import pytest
from hosts import start_run
from torchruns import TINY, events, losses, savers, train_warm, wait_until

from elastictrain.chaos.network.hosts import VirtualNetwork

sys.path.insert(0, str(Path(__file__).parents[1] / "process/saver"))

from faultyruns import Fault, fired, with_faults

STEPS = 120
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    f"train.steps={STEPS}",
    "parallel=fsdp",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=0",
    "checkpoint.snapshot_every_steps=2",
    "fault.heartbeat_s=0.2",
)

_PEERS = "elastictrain.checkpoint.peers"
FAULTS = (
    Fault(f"{_PEERS}.replicator:Replicator._before_frame", "saver", nth=2),
    Fault(f"{_PEERS}.server:_receive_into", "saver", nth=2),
    Fault(f"{_PEERS}.client:PeerConnection.put", "both", "after", nth=2),
    Fault(f"{_PEERS}.server:_receive_into", "both", nth=2),
    Fault(f"{_PEERS}.server:_receive_into", "both", "after", nth=2),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(train_warm(ARGUMENTS, world_size=2, folder=tmp_path_factory.mktemp("undisturbed")))


def test_sigkill_while_replicas_are_on_their_way(
    network: VirtualNetwork, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    hosts = [network.add("a"), network.add("b")]
    run_dir = tmp_path / "run"
    job = start_run(
        hosts,
        [*ARGUMENTS, "task.pause_s=0.05"],
        run_dir=run_dir,
        logs=tmp_path / "logs",
        max_restarts=3,
        extra_environment=with_faults(FAULTS, tmp_path / "faults"),
    )
    job.train(timeout_s=150)
    assert fired(tmp_path / "faults") == len(FAULTS)
    assert losses(run_dir) == undisturbed
    first, *later = events(run_dir, "resume")
    assert first["tier"] == "none"
    # Nothing was in storage to go on from, and nothing that two hosts had held was lost.
    assert len(later) == sum(fault.what == "both" for fault in FAULTS)
    rows = events(run_dir, "replicated")
    for resume in later:
        assert resume["tier"] in ("memory", "peer"), resume
        before = {(row["of_rank"], row["step"]) for row in rows if row["incarnation"] < resume["incarnation"]}
        common = [step for rank, step in before if rank == 0 and (1, step) in before]
        assert resume["step"] >= max(common, default=0), (resume, sorted(before))
    assert [row["reason"] for row in events(run_dir, "checkpoint_saved")] == ["end"]
    for host in hosts:
        wait_until(lambda host=host: not savers(host.memory), timeout_s=60, what="end of the saver")
        assert not list(host.memory.iterdir())
