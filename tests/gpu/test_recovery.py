"""Workers that train over NCCL are killed under the launcher, and the run is that of an undisturbed one, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORKERS, KILLS = 2, 4
RUN = (
    "data=stdlib",
    "data.holdout_samples=0",
    "model=150m",
    "train.seq_len=1024",
    "train.micro_batch=4",
    "train.global_batch=8",
    "train.eval_every_steps=0",
    "optim.schedule=constant",
    "checkpoint.every_steps=0",
    "run.deterministic=true",
    "preflight.checks.gpus=off",
)


@pytest.mark.one_device
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    plan = ["--recipe=llama_fsdp", f"--workers={WORKERS}", f"--kills={KILLS}", "--steps=15", "--every=15", f"--json={figures}"]
    command = [sys.executable, "scripts/bench_recovery.py", *plan, "--", *RUN]
    environment = dict(os.environ)
    if torch.cuda.device_count() < WORKERS:
        # The ranks share a device, and communicate over sockets.
        environment |= {"RANKS_PER_DEVICE": str(WORKERS), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        paths = [str(Path(__file__).parent / "shared_device"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(figures.read_text())
    assert found["problems"] == []
    kills = found["kills"]
    assert len(kills) == KILLS
    # Over sockets a survivor may take longer to leave its groups than it is given; then it is replaced, too.
    kept = [one for one in kills if one["rung"] == "in_place"]
    assert len(kept) >= KILLS // 2
    assert all(one["survivors_kept"] == one["survivors"] for one in kept)
