"""The example of docs/own-task.md works, links lead somewhere, every key and recipe that the documents name exists, and the
reference shows all public names."""

import ast
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from elastictrain.config.compose import read_choices
from elastictrain.config.load import load
from elastictrain.config.schema import DATACLASSES, all_keys
from elastictrain.config.task_signature import build_task, task_keys
from elastictrain.data.__main__ import main as prepare
from elastictrain.storage.opening import open_store
from elastictrain.telemetry.loggers import MetricPoint, make_loggers
from elastictrain.train.checks import open_samples
from elastictrain.train.optimizer import learning_rate, make_optimizers
from elastictrain.train.task import Task
from tests.unit.telemetry.runs import run_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*/README.md")])
OWN_TASK = (
    *("mytask/sines.py", "mytask/conf/recipe/sines.yaml", "mytask/conf/model/wide.yaml"),
    *("mytask/pictures.py", "mytask/conf/recipe/pictures.yaml"),
)


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = (ROOT / "docs" / "own-task.md").read_text()
    blocks = re.findall(r"^```(?:python|yaml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, block in zip(OWN_TASK, blocks, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(block)
    (tmp_path / "mytask" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mytask", "mytask.sines"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "mytask" / "conf"


def test_own_task_composes_and_computes_a_loss(own_task: Path) -> None:
    config = load(["--config-dir", str(own_task), "recipe=sines", "model=wide", "task.noise=0"])
    task = cast(Task, build_task(config))
    samples = open_samples(task, config)
    assert samples.held_out is not None
    torch.manual_seed(0)
    output = task.loss(task.build_model(), samples.train.read(range(32), first=0))
    assert output.weight == 32
    assert 0 < output.loss_sum.item() < 64
    output.loss_sum.backward()


TRAINING = (ROOT / "docs" / "training.md").read_text()
COMMANDS = re.findall(r"^    python -m elastictrain.run (.*)$", TRAINING, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_page_on_training_shows_trains(command: str, own_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, block in re.findall(r"^```python\n# mytask/(\w+)\.py\n(.*?)^```", TRAINING, re.DOTALL | re.MULTILINE):
        (own_task.parent / f"{name}.py").write_text(block)
        monkeypatch.delitem(sys.modules, f"mytask.{name}", raising=False)
    config = load([one.replace("mytask/conf", str(own_task)) for one in shlex.split(command)])
    task, samples = cast(Task, build_task(config)), open_samples(cast(Task, build_task(config)), config)
    torch.manual_seed(0)
    model = task.build_model()
    optimizers = make_optimizers(model, config.optim, task)
    losses, batch = [], samples.train.read(range(64), first=0)
    for step in range(1, 60):
        output = task.loss(model, batch)
        (output.loss_sum / output.weight).backward()
        rate = learning_rate(step, config.optim, total_steps=60)
        optimizers.update(rate=rate, scale=torch.ones(()), finite=torch.tensor(True))
        losses.append(output.loss_sum.item())
    assert "gan" in command or losses[-1] < 0.9 * losses[0]
    assert set(output.metrics) == ({"within_0.1", "above"} if "adapted" in command else set())


def test_the_mixture_of_the_examples_is_prepared_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, field in (("web", "text"), ("code", "content")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({field: "word " * (4 + i % 9)}) + "\n" for i in range(400)))
    text = (ROOT / "docs" / "examples.md").read_text()
    for command in re.findall(r"^    python -m elastictrain.data (prepare .*)$", text, re.MULTILINE):
        assert prepare(shlex.split(command)) == 0
    (command,) = re.findall(r"^    torchrun .* -m elastictrain.run (.*data=mixture.*)$", text, re.MULTILINE)
    config = load(shlex.split(command))
    batch = cast(Any, open_samples(cast(Task, build_task(config)), config).train.read(range(4), first=0))
    assert batch["tokens"].shape == batch["documents"].shape
    assert batch["documents"].max() > 0


def test_the_logger_of_the_document_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "loggers.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "mylogger.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mylogger", raising=False)
    written = tmp_path / "losses.txt"
    ((_, logger),) = make_loggers([{"_target_": "mylogger.TextLogger", "path": str(written)}])
    logger.open(run_of(open_store(str(tmp_path / "llama"))))
    logger.log(MetricPoint(1, 0.0, {"loss/train": 2.0}))
    logger.log(MetricPoint(1, 0.0, {"loss/held_out": 2.0}))
    logger.close(complete=True)
    assert written.read_text() == "llama 1 2.0\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], target


@cache
def known_keys() -> frozenset[str]:
    tasks = ("recipes.llama.LlamaTask", "recipes.digits.DigitsTask")
    return frozenset({*all_keys(), *(key.path for task in tasks for key in task_keys(task)), "task.noise"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_keys_exist(document: Path) -> None:
    # Lines after a `$` show mistakes on purpose.
    text = re.sub(r"^    \$ .*$", "", document.read_text(), flags=re.MULTILINE)
    groups = "|".join([*DATACLASSES, "task", "model"])
    named = re.findall(rf"`((?:{groups})\.[a-z0-9_]+)(?:=[^`]*)?`", text)
    named += re.findall(rf"(?:^|[ (])((?:{groups})\.[a-z0-9_]+)=", text, re.MULTILINE)
    wrong_on_purpose, methods = {"task.nose", "train.step"}, {"run.should_stop"}
    assert {key for key in named if not key.endswith(".py")} - known_keys() <= wrong_on_purpose | methods


def test_readme_names_every_recipe_and_choice_that_exists() -> None:
    text = (ROOT / "README.md").read_text()
    choices = read_choices([])
    table = text[text.index("## Recipes") : text.index("## The first keys")]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(choices["recipe"])
    for document in DOCUMENTS:
        for name in re.findall(r"\brecipe=([a-z_0-9]+)", document.read_text()):
            assert name in {*choices["recipe"], "sines", "pictures", "lora", "again"}, f"{document}: recipe={name}"


@cache
def python_files() -> frozenset[str]:
    """Each by its whole path, and by each of its ends."""
    tops = ("elastictrain", "recipes", "scripts", "tests")
    found = [path.relative_to(ROOT).parts for top in tops for path in (ROOT / top).rglob("*.py")]
    return frozenset("/".join(parts[first:]) for parts in found for first in range(len(parts)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_files_that_a_document_names_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return  # of the past, too
    named = set(re.findall(r"`([\w/]+\.py)\b[^`]*`", document.read_text()))
    assert named - python_files() - {*OWN_TASK, "own_loop.py", "mytask/sines.py"} == set()


@pytest.mark.parametrize("shown", re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE))
def test_the_reference_shows_all_public_names(shown: str) -> None:
    """It leaves out those without a docstring. What it shows is a module, or a name in one."""
    module, _, name = shown.rpartition(".")
    whole = ROOT.joinpath(*shown.split(".")).with_suffix(".py")
    path = whole if whole.exists() else ROOT.joinpath(*module.split(".")).with_suffix(".py")
    top = [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.ClassDef | ast.FunctionDef)]
    public = [one for one in top if (not one.name.startswith("_") if path is whole else one.name == name)]
    assert public
    assert [one.name for one in public if ast.get_docstring(one) is None] == []
