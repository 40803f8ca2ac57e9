"""Training on webdataset's tar files: killed and resumed the same run, on another world each sample once."""

from pathlib import Path

import pytest
from torchruns import events, kill, last_step, losses, torchrun, train_warm, wait_until

from elastictrain.data.__main__ import main
from elastictrain.data.ledger import check_exactly_once, read_ledger
from elastictrain.storage.opening import open_store

webdataset = pytest.importorskip("webdataset")
pytest.importorskip("grain")

STEPS = 24
RUN = (
    "recipe=digits_ddp",
    "task._target_=tests.process.tar_task.TarTask",
    "model.dropout=0.2",
    f"train.steps={STEPS}",
    "train.global_batch=12",
    "train.micro_batch=4",
    "train.eval_every_steps=8",
    "train.eval_samples=10",
    "checkpoint.every_steps=4",
    "data.ledger=true",
    "optim.schedule=constant",
    "telemetry.log_every_steps=1000",
    "telemetry.loggers=[]",
    "fault.heartbeat_s=0.2",
    "preflight=off",
)


def test_the_same_run_after_a_kill_and_exactly_once_on_another_world(tmp_path: Path) -> None:
    with webdataset.ShardWriter(f"{tmp_path}/web-%02d.tar", maxcount=20, verbose=0) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:04d}", "bin": bytes([5 * number]) * 64, "cls": number % 4})
    assert main(["index", f"{tmp_path}/web-*.tar", "--out", f"{tmp_path}/index", "--workers", "2"]) == 0
    arguments = [*RUN, f"task.index={tmp_path}/index"]
    whole = train_warm(arguments, world_size=2, folder=tmp_path / "whole")
    killed = tmp_path / "killed" / "run"
    with torchrun(
        [*arguments, "data.workers=1", f"run.dir={killed}"], world_size=2, folder=killed.parent, max_restarts=1
    ) as run:
        wait_until(lambda: last_step(killed) >= 9, what="step 9")
        kill(run.workers()[1])
        assert run.wait() == 0, run.output()[-5000:]
    assert events(killed, "resume")[-1]["step"] > 0
    for event in ("step", "eval"):
        assert losses(killed, event) == losses(whole, event)
    train_warm([*arguments, "train.steps=30"], world_size=3, folder=killed.parent)
    assert last_step(killed) == 30
    rows = list(read_ledger(open_store(str(killed))))
    assert check_exactly_once(rows, steps=30, global_batch=12, num_samples=50, seed=0, shuffle=True) == ()
