"""The whole path on two GPUs under NCCL: killed and resumed, sharded and copied, in both precisions."""

import random
import re
import signal
from pathlib import Path

import pytest
from torchruns import TINY, events, kill, last_step, losses, torchrun, train, wait_until

STEPS = 60
SMALL = (
    *TINY,
    "model.dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=512",
    "train.seq_len=256",
    f"train.steps={STEPS}",
    "checkpoint.every_steps=5",
    "train.eval_every_steps=0",
    # Pages of a file on a disk cannot be locked for a device.
    "checkpoint.memory_dir=/dev/shm",
)
VARIANTS = {
    "fsdp-bf16": ("parallel=fsdp", "train.precision=bf16", "run.deterministic=true"),
    "ddp-fp32": ("parallel=ddp", "run.deterministic=true"),
    "fsdp-muon-ema": (
        "parallel=fsdp",
        "optim._target_=tests.process.own_training.muon_and_adamw",
        "optim.arguments={adamw_lr: 0.003}",
        "train.ema=0.99",
        "run.deterministic=true",
    ),
    "fsdp-bf16-compiled": (
        "parallel=fsdp",
        "train.precision=bf16",
        "train.compile=true",
        "train.activation_checkpointing=selective",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_sigkill_and_resume(variant: str, tmp_path: Path) -> None:
    arguments = [*SMALL, *VARIANTS[variant]]
    output = train([*arguments, f"run.dir={tmp_path}/whole"], world_size=2, folder=tmp_path / "a", timeout_s=200)
    assert not re.search(r"warn|abort|terminate|traceback|leaked", output, re.IGNORECASE), output[-3000:]
    undisturbed = losses(tmp_path / "whole")
    run_dir = tmp_path / "killed"
    with torchrun([*arguments, f"run.dir={run_dir}"], world_size=2, folder=tmp_path / "b", max_restarts=3) as run:
        wait_until(lambda: last_step(run_dir) >= 12, timeout_s=120, what="step 12")
        kill(random.Random(variant).choice(run.workers()))
        assert run.wait(200) == 0, run.output()[-5000:]
    resumed = {row["step"]: row["loss"] for row in events(run_dir, "step")}
    assert len(events(run_dir, "start")) == 2
    if "run.deterministic=true" in arguments:
        assert resumed == undisturbed
    else:
        assert resumed == pytest.approx(undisturbed, rel=1e-3)


@pytest.mark.parametrize("kind", ["hsdp", "fsdp"])
def test_losses_follow_neither_the_wrapping_nor_the_world(kind: str, tmp_path: Path) -> None:
    short = [*SMALL, "train.steps=20", "optim.schedule=constant"]
    train([*short, "parallel=ddp", f"run.dir={tmp_path}/one"], world_size=1, folder=tmp_path / "a")
    shards = ["parallel.shard_size=1"] if kind == "hsdp" else []
    train([*short, f"parallel={kind}", *shards, f"run.dir={tmp_path}/two"], world_size=2, folder=tmp_path / "b")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_sigterm_saves_and_the_next_start_goes_on_elsewhere(tmp_path: Path) -> None:
    arguments = [*SMALL, "train.steps=100000", "optim.schedule=constant", "checkpoint.every_steps=0", f"run.dir={tmp_path}/run"]
    with torchrun([*arguments, "parallel=fsdp"], world_size=2, folder=tmp_path / "a") as run:
        wait_until(lambda: last_step(tmp_path / "run") >= 10, timeout_s=120, what="step 10")
        run.process.send_signal(signal.SIGTERM)
        run.wait(60)
    stop = events(tmp_path / "run", "stop")
    assert [row["exit_code"] for row in stop] == [75]
    step = stop[0]["step"]
    train([*arguments, "parallel=ddp", f"train.steps={step + 5}"], world_size=1, folder=tmp_path / "b")
    assert events(tmp_path / "run", "resume")[-1]["step"] == step


def test_a_hung_rank_is_noticed_and_named(tmp_path: Path) -> None:
    endless = ("train.steps=100000", "optim.schedule=constant", "checkpoint.every_steps=0")
    arguments = [*SMALL, *endless, "fault.step_timeout_s=10", f"run.dir={tmp_path}/run"]
    with torchrun([*arguments, "parallel=fsdp"], world_size=2, folder=tmp_path / "a") as run:
        wait_until(lambda: last_step(tmp_path / "run") >= 10, timeout_s=120, what="step 10")
        sleeper = run.workers()[1]
        sleeper.suspend()
        wait_until(lambda: bool(events(tmp_path / "run", "failure")), timeout_s=40, what="the failure event")
        wait_until(lambda: not run.workers()[:1] or run.workers()[0].pid == sleeper.pid, timeout_s=30, what="end of rank 0")
        kill(sleeper)
        assert run.wait(60) != 0
    failure = events(tmp_path / "run", "failure")[0]
    assert failure["exit_code"] == 71
    assert failure["rank"] == 0
    assert any(name.startswith("rank 1 on ") for name in failure["last_heard"])
    assert (tmp_path / "run" / failure["flight_recorder"]).exists()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gloo_trains_on_gpus(kind: str, tmp_path: Path) -> None:
    short = [*SMALL, "train.steps=20", f"parallel={kind}", "preflight=full"]
    train([*short, f"run.dir={tmp_path}/nccl"], world_size=2, folder=tmp_path / "a")
    gloo = ["parallel.backend=gloo", "parallel.device=cuda", f"run.dir={tmp_path}/gloo"]
    train([*short, *gloo], world_size=2, folder=tmp_path / "b")
    (start,) = events(tmp_path / "gloo", "start")
    assert start["backend"] == "gloo"
    assert start["device"] != "cpu"
    assert losses(tmp_path / "gloo") == pytest.approx(losses(tmp_path / "nccl"), rel=1e-4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_whose_device_waits_for_its_host_is_named(kind: str, tmp_path: Path) -> None:
    slow = ("task._target_=tests.process.lagging.LaggingLlama", "task.lags=1", "task.longer_s=0.02", "train.steps=120")
    train([*SMALL, *slow, f"parallel={kind}", f"run.dir={tmp_path}/run"], world_size=2, folder=tmp_path)
    (found,) = events(tmp_path / "run", "straggler")
    assert (found["of_rank"], found["phase"]) == (1, "forward")
