"""Checkpoints among several ranks: any sharding loads any other, faults are known to all, and a save survives SIGKILL."""

import json
from pathlib import Path

import pytest
from torchruns import warm_ranks

HERE = Path(__file__).parent


def run(script: str, *args: str, folder: Path, ranks: int = 1) -> str:
    """Output of a script on some ranks."""
    return warm_ranks([str(HERE / script), *args], world_size=ranks, folder=folder, timeout_s=240, errors=["UserWarning"])


def last_json(output: str) -> dict[str, int]:
    """What a script says at its end; where torch has brought triton, that complains after it when the interpreter ends."""
    line = next(line for line in reversed(output.splitlines()) if line.startswith("{"))
    found: dict[str, int] = json.loads(line)
    return found


def test_any_sharding_loads_any_other(tmp_path: Path) -> None:
    chain = [("fsdp", 4), ("ddp", 2), ("single", 1), ("fsdp", 3), ("hsdp", 4)]
    for step, (kind, ranks) in enumerate(chain, start=1):
        output = run("reshard_worker.py", kind, str(tmp_path), str(step), ranks=ranks, folder=tmp_path)
        assert last_json(output)["world_size"] == ranks
    manifests = {path.parent.name: json.loads(path.read_bytes()) for path in tmp_path.glob("checkpoints/*/manifest.json")}
    assert [len(manifest.get("parts", ())) for _, manifest in sorted(manifests.items())] == [1, 3, 0]
    hsdp = manifests["step-000000005"]
    assert {file["name"].split("-")[1] for file in hsdp["files"]} == {f"r0000{rank}" for rank in range(4)}


def test_replicas_are_written_once_and_shared_out(tmp_path: Path) -> None:
    run("reshard_worker.py", "ddp", str(tmp_path), "1", ranks=2, folder=tmp_path)
    manifest = json.loads((tmp_path / "checkpoints/step-000000001/manifest.json").read_bytes())
    by_rank = [sum(file["bytes"] for file in manifest["files"] if f"-r0000{rank}-" in file["name"]) for rank in range(2)]
    assert min(by_rank) > 0.3 * max(by_rank)
    assert all(len(tensor["chunks"]) == 1 for tensor in manifest["tensors"].values())


def test_a_fault_on_one_rank_is_known_to_all(tmp_path: Path) -> None:
    run("faults_worker.py", str(tmp_path / "run"), ranks=3, folder=tmp_path)


@pytest.mark.timeout(200)
def test_killed_at_every_operation_of_a_save(tmp_path: Path) -> None:
    counts = last_json(run("kill_worker.py", str(tmp_path / "runs"), folder=tmp_path))
    assert counts["before"] > 20
    assert counts["after"] > 5
