"""The programs of docs/examples.md train, and a worker that is killed changes nothing."""

import importlib.util
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torchruns import (
    REPOSITORY,
    alone,
    events,
    kill,
    last_step,
    losses,
    savers,
    started,
    wait_until,
    warm_ranks,
    warm_ranks_started,
)

import elastictrain
from elastictrain.data.__main__ import main
from elastictrain.errors import EXIT_TRANSPORT

TEXT = (REPOSITORY / "docs" / "examples.md").read_text()
OPTIONS = 'options = {"checkpoint": {"every_steps": 100}}'


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
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
    yield tmp_path
    for saver in savers(tmp_path):
        saver.kill()


@pytest.mark.parametrize(("name", "steps"), [("gpt", 100), ("gan", 400)])
def test_a_loop_goes_on_after_a_kill(name: str, steps: int, folder: Path) -> None:
    assert OPTIONS in TEXT
    marked = (folder / f"{name}.py").read_text().count("# +")
    assert f"| {marked} |" in next(line for line in TEXT.splitlines() if f"(#a-{name}-" in line)
    run_dir = folder / "run"
    program = ["-m", name, str(run_dir), str(steps)]
    with warm_ranks_started(program, world_size=2, folder=folder) as ranks:
        wait_until(lambda: last_step(run_dir) >= steps // 5, what=f"step {steps // 5}")
        kill(psutil.Process(ranks[1].process.pid))
        assert ranks[0].wait(120) == EXIT_TRANSPORT
    warm_ranks(program, world_size=2, folder=folder)
    # Steps that were repeated had the same losses: `losses` compares.
    assert sorted(losses(run_dir)) == list(range(1, steps + 1))
    first, second = events(run_dir, "resume")
    assert (first["tier"], second["tier"]) == ("none", "memory")
    assert 0 < second["step"] < steps


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
