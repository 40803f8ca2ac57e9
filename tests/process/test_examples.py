"""The programs of docs/examples.md train, and a worker that is killed changes nothing."""

import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchruns import REPOSITORY, Run, alone, events, kill, last_step, losses, savers, started, torchrun, wait_until

import elastictrain
from elastictrain.data.__main__ import main

TEXT = (REPOSITORY / "docs" / "examples.md").read_text()
OPTIONS = 'options = {"checkpoint": {"every_steps": 100}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page, and host memory of the test's own."""
    for name, block in re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        quick = f'{OPTIONS[:-2]}, "memory_dir": "{tmp_path}/memory"}}, "preflight": {{"level": "off"}}'
        (tmp_path / name).write_text(block.replace(OPTIONS, f'{quick}, "telemetry": {{"flush_s": 0.1}}}}'))
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (tmp_path / "mytask" / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "mytask" / "conf" / "recipe" / "lora.yaml").write_text(recipe)
    (tmp_path / "mytask" / "__init__.py").touch()
    (tmp_path / "memory").mkdir()
    return tmp_path


def kill_rank_1(run: Run, run_dir: Path, *, program: str, at_step: int, steps: int) -> None:
    """SIGKILL it at a step; the run must go on from host memory and repeat what it repeats with the same losses."""
    wait_until(lambda: last_step(run_dir) >= at_step, what=f"step {at_step}")
    kill(run.workers(program=program)[1])
    assert run.wait(120) == 0, run.output()[-5000:]
    assert sorted(losses(run_dir)) == list(range(1, steps + 1))
    resumed = events(run_dir, "resume")
    assert [row["tier"] for row in resumed] == ["none", "memory"]
    assert resumed[1]["step"] > 0


@pytest.mark.parametrize(("name", "steps"), [("gpt", 150), ("gan", 600)])
def test_a_loop_goes_on_after_a_kill(name: str, steps: int, folder: Path) -> None:
    assert OPTIONS in TEXT
    marked = (folder / f"{name}.py").read_text().count("# +")
    assert f"| {marked} |" in next(line for line in TEXT.splitlines() if f"(#a-{name}-" in line)
    module = [str(folder / f"{name}.py")]
    run_dir, arguments = folder / "run", [str(folder / "run"), str(steps)]
    with torchrun(arguments, world_size=2, folder=folder / "log", max_restarts=1, module=module, warm=False) as run:
        kill_rank_1(run, run_dir, program=f"{name}.py", at_step=steps // 5, steps=steps)
    assert savers(folder) == []


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra integrations")
def test_lora_changes_a_llama_of_hugging_face(folder: Path) -> None:
    words = random.Random(0)
    lines = (json.dumps({"text": " ".join(words.choices(["one", "two", "three"], k=30))}) + "\n" for _ in range(400))
    (folder / "web.jsonl").write_text("".join(lines))
    assert main(["prepare", str(folder / "web.jsonl"), "--out", str(folder / "tokens-web")]) == 0
    with started([sys.executable, "-m", "mytask.base"], log=folder / "base.txt", warm=False) as base:
        assert base.wait(60) == 0, base.output()
    arguments = [
        *("--config-dir", "mytask/conf", "recipe=lora", f"run.dir={folder}/run", "train.eval_every_steps=0"),
        *(f"data.path={folder}/tokens-web", "train.steps=20", "telemetry.loggers=[]", "preflight=off"),
    ]
    code, output = alone(arguments, folder=folder, cwd=folder)
    assert code == 0, output
    found = losses(folder / "run")
    assert found[20] < found[1] - 0.2
    tensors = elastictrain.load(str(folder / "run"))
    base, changed = load_file(folder / "base" / "model.safetensors"), 0
    for name, tensor in base.items():
        # The frozen weights are those of the folder.
        own = next(one for one in (name, name.replace("_proj.weight", "_proj.base.weight")) if f"model.{one}" in tensors)
        assert torch.equal(tensors[f"model.{own}"], tensor)
        changed += own != name
    assert changed == 4
