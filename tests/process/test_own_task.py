"""Tasks other than the Llama: the one of the documentation, in a package of its own, and the digits with their dropout."""

import importlib.util
import re
from pathlib import Path
from statistics import mean

import pytest
from torchruns import REPOSITORY, events, kill, last_step, losses, torchrun, train_warm, wait_until

QUIET = ("telemetry.log_every_steps=1000", "telemetry.loggers=[]", "fault.heartbeat_s=0.2")


def write_files(folder: Path, text: str, opening: str = r"```(?:python|yaml)\n") -> None:
    """The files that a page shows: a fenced block is the file that its first line names, or else the last one mentioned."""
    for block in re.finditer(rf"{opening}(.*?)```", text, re.DOTALL):
        own = re.match(r"# (mytask/[\w/]+\.py)\n", block[1])
        name = own[1] if own else re.findall(r"`(mytask/[\w/]+\.(?:py|yaml))`", text[: block.start()])[-1]
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block[1])
    (folder / "mytask" / "__init__.py").touch()


def write_documented_files(folder: Path) -> None:
    """The files that docs/own-task.md shows."""
    write_files(folder, (REPOSITORY / "docs" / "own-task.md").read_text())


def killed_once(arguments: list[str], *, run_dir: Path, folder: Path, after_step: int) -> str:
    """Train on two ranks to the end, and SIGKILL one of them on the way; returns the output."""
    with torchrun([*arguments, *QUIET, f"run.dir={run_dir}"], world_size=2, folder=folder, max_restarts=1) as run:
        wait_until(lambda: last_step(run_dir) >= after_step, what=f"step {after_step}")
        kill(run.workers()[1])
        assert run.wait() == 0, run.output()[-5000:]
        assert events(run_dir, "resume")[-1]["step"] > 0
        return run.output()


def test_the_documented_task_learns_and_is_resumed(tmp_path: Path) -> None:
    write_documented_files(tmp_path)
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")}
    names = (
        "__init__.py",
        "sines.py",
        "conf/recipe/sines.yaml",
        "conf/model/wide.yaml",
        "pictures.py",
        "conf/recipe/pictures.yaml",
    )
    assert files == {f"mytask/{name}" for name in names}
    steps = 500
    arguments = [
        *("--config-dir", "mytask/conf", "recipe=sines", "model=wide", "task._target_=mytask.sines.SinesTask"),
        *("task.noise=0.05", f"train.steps={steps}", "data.workers=1", "checkpoint.every_steps=20"),
    ]
    run_dir = tmp_path / "run"
    killed_once(arguments, run_dir=run_dir, folder=tmp_path, after_step=25)
    # What was done twice was the same twice: `losses` compares.
    found = losses(run_dir)
    assert sorted(found) == list(range(1, steps + 1))
    assert mean(found[step] for step in range(steps - 20, steps)) < 0.2 * found[1]
    evaluated = [row["loss"] for row in events(run_dir, "eval")]
    assert evaluated[-1] < 0.2 * found[1]


def test_the_documented_pictures_are_learnt(tmp_path: Path) -> None:
    write_documented_files(tmp_path)
    arguments = ["--config-dir", "mytask/conf", "recipe=pictures", "data.workers=1", *QUIET, f"run.dir={tmp_path}/run"]
    with torchrun(arguments, world_size=2, folder=tmp_path) as run:
        assert run.wait() == 0, run.output()[-5000:]
    found, evaluated = losses(tmp_path / "run"), losses(tmp_path / "run", "eval")
    assert mean(found[step] for step in range(81, 101)) < 0.3 * found[1]
    assert evaluated[100] < 0.3 * found[1]


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits come with scikit-learn")
def test_digits_go_on_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    steps = 300
    arguments = [
        *("recipe=digits_ddp", "model.dropout=0.3", f"train.steps={steps}", "train.eval_every_steps=0"),
        "checkpoint.every_steps=20",
    ]
    undisturbed = train_warm([*arguments, *QUIET], world_size=2, folder=tmp_path / "first")
    output = killed_once(arguments, run_dir=tmp_path / "killed", folder=tmp_path / "second", after_step=25)
    right = losses(undisturbed)
    assert sorted(right) == list(range(1, steps + 1))
    assert losses(tmp_path / "killed") == right
    recognised = re.search(r"(\d+) of (\d+) held-out digits recognised", output)
    assert recognised is not None
    assert int(recognised[1]) > 0.9 * int(recognised[2])
