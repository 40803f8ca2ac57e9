"""What a user may bring besides a model: after SIGKILL of a worker the run is the same, bit for bit."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_own_task import write_files
from torch import Tensor
from torchruns import (
    REPOSITORY,
    TINY,
    alone,
    events,
    kill,
    last_step,
    losses,
    memory_arguments,
    started,
    torchrun,
    train_warm,
    wait_until,
)

from elastictrain.checkpoint.evaluations import read_evaluations
from elastictrain.checkpoint.reader import ManifestReader, load_tensors
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.storage.opening import open_store

STEPS = 20
OWN = "tests.process.own_training"
ARGUMENTS = (
    *TINY,
    f"train.steps={STEPS}",
    "train.eval_every_steps=10",
    "train.eval_samples=16",
    "data.holdout_samples=16",
    "checkpoint.every_steps=5",
    "fault.heartbeat_s=0.2",
    "task._target_=tests.process.paced.PacedLlama",
)
SGD = ("optim._target_=torch.optim.SGD", "optim.arguments={momentum: 0.9, nesterov: true}", "optim.lr=0.05")
MUON = (f"optim._target_={OWN}.muon_and_adamw", "optim.arguments={adamw_lr: 0.003}", "optim.lr=0.02")
CASES = {
    "sgd": (*SGD, f"task._target_={OWN}.GroupedLlama", f"optim.schedule={{_target_: {OWN}.inverse_root, half: 9}}"),
    "muon": MUON,
    "muon_fsdp": (*MUON, "parallel=fsdp"),
    "ema_fsdp": ("train.ema=0.9", "parallel=fsdp"),
}
"""An average under DDP is that of the other tests here, a user's optimizer under FSDP that of Muon."""
BY_TORCHRUN = {"sgd", "ema_fsdp"}


def killed_once(
    arguments: list[str], *, folder: Path, launched: bool, extra_environment: Mapping[str, str] | None = None
) -> Path:
    """Train on two workers to the end, and SIGKILL one on the way; under the launcher the other one keeps its process."""
    run_dir, log = folder / "run", folder / "log.txt"
    folder.mkdir()
    paced = [*arguments, *(() if extra_environment else ("task.pause_s=0.05",)), f"run.dir={run_dir}"]
    if launched:
        own = ("launch.processes=2", "launch.poll_s=0.2", "launch.lost_s=2", "launch.backoff_s=0.1", "launch.notices=false")
        command = [sys.executable, "-m", "elastictrain.launch", *paced, *own, *memory_arguments(arguments, log)]
        context = started(command, log=log, extra_environment=extra_environment or {})
    else:
        context = torchrun(paced, world_size=2, folder=folder, max_restarts=1)
    with context as run:
        wait_until(lambda: last_step(run_dir) >= 13 or run.process.poll() is not None, what="step 13")
        kill(run.workers()[1])
        assert run.wait() == 0, run.output()[-5000:]
    assert events(run_dir, "resume")[-1]["step"] > 0
    assert [row["rung"] for row in events(run_dir, "recovery")] == ["in_place"] * launched
    return run_dir


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_it_is_the_same_run(case: str, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, *CASES[case]]
    undisturbed = train_warm(arguments, world_size=2, folder=tmp_path / "first")
    killed = killed_once(arguments, folder=tmp_path / "second", launched=case not in BY_TORCHRUN)
    for event in ("step", "eval"):
        assert losses(killed, event) == losses(undisturbed, event)
    found = losses(killed)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1] - 0.5
    metrics = [{row["step"]: row.get("metrics") for row in events(one, "step")} for one in (killed, undisturbed)]
    assert metrics[0] == metrics[1]
    assert all(
        set(one) == ({"even"} if "GroupedLlama" in str(arguments) else set()) for one in metrics[0].values() if one is not None
    )
    if "train.ema=0.9" in arguments:
        stored = tensors_of(killed)
        assert {name for name in stored if name.startswith("ema.")} == {
            name.replace("model.", "ema.", 1) for name in stored if name.startswith("model.")
        }


def tensors_of(run_dir: Path, step: int = STEPS) -> dict[str, Tensor]:
    """What the checkpoint of a step holds."""
    folder = CheckpointFolder(open_store(f"{run_dir}/checkpoints/step-{step:09d}"), "")
    manifest = ManifestReader(folder).manifest
    found = {name: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for name, one in manifest.tensors.items()}
    load_tensors(folder, manifest, tensors=found)
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_few_parameters_are_trained_on_top_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    base = train_warm(ARGUMENTS, world_size=2, folder=tmp_path / "base")
    checkpoint = f"{base}/checkpoints/step-{STEPS:09d}"
    arguments = [
        *(*ARGUMENTS, f"train.init_from={checkpoint}", f"task._target_={OWN}.LoraLlama", "train.ema=0.8", f"parallel={kind}"),
        "optim.lr=0.01",
    ]
    undisturbed = train_warm(arguments, world_size=2, folder=tmp_path / "first")
    killed = killed_once(arguments, folder=tmp_path / "second", launched=True)
    for event in ("step", "eval"):
        assert losses(killed, event) == losses(undisturbed, event)
    assert losses(killed)[1] < losses(base)[1] - 0.5
    before, after = tensors_of(base), tensors_of(killed)
    lora = {name.removeprefix("model.") for name in after if name.startswith("model.") and ".lora_" in name}
    assert len(lora) == 2 * 2 * 2
    for name in after.keys() - {f"{family}.{one}" for family in ("model", "ema") for one in lora}:
        if name.startswith("optim."):
            assert name.split(".", 2)[2] in lora
        else:
            assert torch.equal(after[name], before[name.replace(".base.", ".")])
    assert all(after[f"model.{name}"].any() for name in lora)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_documented_gan_is_the_same_run_after_a_kill(kind: str, tmp_path: Path) -> None:
    for page, pattern in (("own-task", r"```(?:python|yaml)\n"), ("training", r"```python\n(?=# mytask)")):
        write_files(tmp_path / "files", (REPOSITORY / "docs" / f"{page}.md").read_text(), pattern)
    steps = 100
    arguments = [
        *("--config-dir", str(tmp_path / "files/mytask/conf"), "recipe=sines", "task._target_=mytask.gan.GanTask"),
        *(
            f"train.steps={steps}",
            "train.micro_batch=8",
            "train.eval_every_steps=50",
            "checkpoint.every_steps=5",
            "train.ema=0.9",
        ),
        *(f"parallel={kind}", "telemetry.log_every_steps=1000", "preflight=off", "fault.heartbeat_s=0.2"),
    ]
    path = {"PYTHONPATH": f"{tmp_path}/files:{REPOSITORY}"}
    undisturbed = train_warm(arguments, world_size=2, folder=tmp_path / "first", extra_environment=path)
    killed = killed_once(arguments, folder=tmp_path / "second", launched=True, extra_environment=path)
    for event in ("step", "eval"):
        assert losses(killed, event) == losses(undisturbed, event)
    told = [{row["step"]: row["metrics"] for row in events(one, "step")} for one in (killed, undisturbed)]
    assert told[0] == told[1]
    assert {name for one in told[0].values() for name in one} == {"critic_loss", "generator_loss"}


def test_training_ends_when_evaluations_bring_no_gain_and_the_best_checkpoints_stay(tmp_path: Path) -> None:
    arguments = [
        *(*ARGUMENTS, "train.steps=300", "train.eval_every_steps=5", "train.stop_after_evals_without_gain=3"),
        *("checkpoint.keep_best=2", "checkpoint.keep_last=1", "optim.lr=0.2", "optim.schedule=constant"),
    ]
    undisturbed = train_warm([*arguments, "checkpoint.buffers=0"], world_size=2, folder=tmp_path / "first")
    killed = killed_once(arguments, folder=tmp_path / "second", launched=True)
    right = losses(undisturbed, "eval")
    by_loss = sorted(right, key=lambda step: (right[step], step))
    end = max(right)
    assert end == by_loss[0] + 15 < 300
    for run_dir in (undisturbed, killed):
        assert losses(run_dir) == losses(undisturbed)
        assert losses(run_dir, "eval") == right
        (stop,) = [row for row in events(run_dir, "stop") if row["rank"] == 0]
        assert (stop["step"], stop["exit_code"], stop["saved"]) == (end, 0, "storage")
        stored = read_evaluations(open_store(str(run_dir)))
        assert (dict(stored.losses), list(stored.best)) == (right, by_loss[:2])
        kept = {int(folder.name[5:14]) for folder in (run_dir / "checkpoints").iterdir() if any(folder.glob("manifest.json"))}
        # Where host memory has no room in time, a save is of a later step.
        saved = {row["step"] for row in events(run_dir, "checkpoint_saved")}
        assert kept == {*by_loss[:2], end} & saved
        assert run_dir == killed or saved >= {*by_loss[:2], end}
    # Another start has nothing to do.
    code, output = alone([*arguments, f"run.dir={killed}"], folder=tmp_path / "second" / "again")
    assert code == 0, output
    assert max(losses(killed)) == end
