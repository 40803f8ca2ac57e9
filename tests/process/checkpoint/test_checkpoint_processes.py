import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(ROOT)}


def run(script: str, *args: str, ranks: int = 0) -> str:
    """Output of a script: alone, or as `ranks` workers of torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, "-W", "error::UserWarning", *launcher, str(HERE / script), *args]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_any_sharding_loads_any_other(tmp_path: Path) -> None:
    chain = [("fsdp", 4), ("ddp", 2), ("single", 0), ("fsdp", 3), ("hsdp", 4)]
    for step, (kind, ranks) in enumerate(chain, start=1):
        output = run("reshard_worker.py", kind, str(tmp_path), str(step), ranks=ranks)
        assert json.loads(output.splitlines()[-1])["world_size"] == max(1, ranks)
    manifests = {path.parent.name: json.loads(path.read_bytes()) for path in tmp_path.glob("checkpoints/*/manifest.json")}
    hsdp = manifests["step-000000005"]
    assert {file["name"].split("-")[1] for file in hsdp["files"]} == {f"r0000{rank}" for rank in range(4)}


def test_replicas_are_written_once_and_shared_out(tmp_path: Path) -> None:
    run("reshard_worker.py", "ddp", str(tmp_path), "1", ranks=2)
    manifest = json.loads((tmp_path / "checkpoints/step-000000001/manifest.json").read_bytes())
    by_rank = [sum(file["bytes"] for file in manifest["files"] if f"-r0000{rank}-" in file["name"]) for rank in range(2)]
    assert min(by_rank) > 0.3 * max(by_rank)
    assert all(len(tensor["chunks"]) == 1 for tensor in manifest["tensors"].values())


def test_a_fault_on_one_rank_is_known_to_all(tmp_path: Path) -> None:
    run("faults_worker.py", str(tmp_path), ranks=3)


@pytest.mark.timeout(200)
def test_killed_at_every_operation_of_a_save(tmp_path: Path) -> None:
    counts = json.loads(run("kill_worker.py", str(tmp_path)).splitlines()[-1])
    assert counts["before"] > 20
    assert counts["after"] > 5
