"""A run in 8 bits is continued bit for bit, and goes on in bf16 with the same state."""

from pathlib import Path

import pytest
from torchruns import REPOSITORY, TINY, events, losses, train_warm

pytest.importorskip("torchao", reason="needs the extra fp8")

HOOK = {"PYTHONPATH": f"{REPOSITORY}/tests/process/fp8_on_cpu:{REPOSITORY}"}
RUN = (*TINY, "train.precision=fp8", "optim.schedule=constant", "checkpoint.every_steps=100")


def test_resumed_and_changed(tmp_path: Path) -> None:
    def run(folder: str, *arguments: str, world_size: int) -> dict[int, float]:
        return losses(train_warm([*RUN, *arguments], world_size=world_size, folder=tmp_path / folder, extra_environment=HOOK))

    whole = run("whole", "parallel=fsdp", "train.steps=4", world_size=2)
    run("parts", "parallel=fsdp", "train.steps=2", world_size=2)
    assert run("parts", "parallel=fsdp", "train.steps=4", world_size=2) == whole
    changed = ("train.precision=bf16", "run.on_change=continue", "train.steps=5")
    found = run("parts", "parallel=ddp", *changed, world_size=1)
    assert [row["step"] for row in events(tmp_path / "parts" / "run", "resume")] == [0, 2, 4]
    assert found[5] == pytest.approx(found[4], rel=0.1)
