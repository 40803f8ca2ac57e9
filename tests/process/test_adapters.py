"""The programs of docs/adapters.md, killed, stopped and started again, equal those that nothing happens to; and what frameworks
compute without us."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torchruns import REPOSITORY, events, last_step, losses, savers, started, torchrun

import elastictrain

PAGE = (REPOSITORY / "docs/adapters.md").read_text()
NAMES = ("trainer", "lightning_fit", "accelerated", "titan")
AHEAD = {"AHEAD": "accelerate lightning.pytorch transformers.trainer transformers.models.llama.modeling_llama"}
"""Most of what such a program takes; that of TorchTitan's kind needs none of it."""
STEPS = 26  # two epochs of the first two

FAULTS = """
import time
from pathlib import Path
from elastictrain.data.samples import derive_seed
from elastictrain.own_loop.run import Run
from elastictrain.own_loop.session import present_session
from elastictrain.train.parameters import seed_everything
step_done = Run.step_done


def fail(run, step, metrics=None):
    \"\"\"As FAULTS tells: a signal for a rank that has made the update of a step, once.\"\"\"
    for fault in os.environ.get("FAULTS", "").split():
        name, rank, at = fault.split(":")
        mark = Path(f"{sys.argv[1]}-{fault}")
        if (rank, int(at)) == (os.environ.get("RANK"), step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.Signals[name])
            # A thread reads it, some steps later on a machine that is busy.
            while present_session().context.stop_request() is None:
                time.sleep(0.001)
    step_done(run, step, metrics)


def seed(step):
    session = present_session()
    seed_everything(derive_seed(session.context.config.run.seed, "own loop", step, session.context.identity.rank))


Run.step_done = fail
"""

PLAIN = {
    "trainer": """
import transformers


class Seeded(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        seed(state.global_step + 1)


Trainer(copied, arguments, train_dataset=dataset, eval_dataset=dataset[:16], callbacks=[Seeded()]).train()
""",
    "lightning_fit": """
import lightning


class Seeded(lightning.pytorch.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % 2 == 0:
            seed(trainer.global_step + 1)


options = {"max_epochs": 2, "accumulate_grad_batches": 2, "enable_checkpointing": False, "logger": False}
Trainer(callbacks=[Seeded()], devices=2, **options).fit(copied, loader, held_out)
""",
}
"""The framework's own training of a copy of the model, whose steps have random numbers as ours."""

EQUAL = """
assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True))
Path(f"{folder}-equal").touch()
"""


@pytest.fixture(autouse=True)
def _no_saver_is_left(tmp_path: Path):
    yield
    for saver in savers(tmp_path):
        saver.kill()


def program(name: str, folder: Path) -> Path:
    """A program of the page, with faults, and with the framework's own training where PLAIN is set."""
    source = dict(zip(NAMES, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))[name]
    memory = folder / "host-memory"
    memory.mkdir(exist_ok=True)
    given = f'"every_steps": 20, "memory_dir": "{memory}"}}, "preflight": {{"level": "off"}}, "telemetry": {{"flush_s": 0.1}}'
    assert source.count('"every_steps": 20}') == 1
    source = source.replace('"every_steps": 20}', given)
    source = source.replace("import sys\n", f"import copy, os, signal, sys\n{FAULTS}", 1)
    source = source.replace("trainer.fit(Classifier()", "model = Classifier()\n    trainer.fit(model")
    if name in PLAIN:
        *_, call = source.rstrip().splitlines()
        compared = textwrap.indent(PLAIN[name] + EQUAL, "        ")
        source = source.replace(call, f"    copied = copy.deepcopy(model)\n{call}\n    if 'PLAIN' in os.environ:\n{compared}")
    path = folder / f"{name}.py"
    path.write_text(source)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_stopped_it_is_the_same_run(name: str, tmp_path: Path) -> None:
    path, whole, broken = program(name, tmp_path), tmp_path / "whole", tmp_path / "broken"
    length = "2" if name in PLAIN else str(STEPS)
    # A stop after the last step of an epoch, and a kill within the next one.
    faults = f"{'SIGTERM' if name == 'lightning_fit' else 'SIGUSR1'}:0:12 SIGKILL:1:20"
    for folder, variables in ((whole, {"PLAIN": "1"}), (broken, {"FAULTS": faults})):
        with torchrun(
            [str(folder), length],
            world_size=2,
            folder=tmp_path / f"{folder.name}-log",
            max_restarts=2 if "FAULTS" in variables else 0,
            module=[str(path)],
            extra_environment={**variables, **(AHEAD if name != "titan" else {}), "HF_HUB_OFFLINE": "1"},
        ) as run:
            assert run.wait(240) == 0, run.output()[-6000:]
    assert (tmp_path / "whole-equal").exists() == (name in PLAIN)
    stops, resumes = events(broken, "stop"), events(broken, "resume")
    assert [(row["exit_code"], row["step"], row["saved"]) for row in stops] == [(75, 13, "storage"), (0, STEPS, "storage")]
    assert [row["tier"] for row in resumes] == ["none", "memory", "memory"]
    assert resumes[1]["step"] == 13 <= resumes[2]["step"] < 20
    assert losses(broken) == losses(whole)
    ours, theirs = elastictrain.load(str(broken)), elastictrain.load(str(whole))
    assert ours.keys() == theirs.keys()
    document, expected = (json.loads(bytes(one.pop("own.json").tolist())) for one in (ours, theirs))
    assert document == expected
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    if name in PLAIN:
        go_on_with_one_rank(path, broken, kept={"trainer": ("steps=2", "steps=4"), "lightning_fit": ("size=4", "size=8")}[name])


def go_on_with_one_rank(path: Path, folder: Path, *, kept: tuple[str, str]) -> None:
    """For an epoch more. `kept`: the change that leaves each step its samples."""
    path.write_text(path.read_text().replace(*kept))
    command = [sys.executable, "-m", path.stem, str(folder), "3"]
    with started(command, log=folder.with_name("alone.txt"), cwd=path.parent, extra_environment=AHEAD) as run:
        assert run.wait(240) == 0, run.output()[-6000:]
    assert events(folder, "resume")[-1]["step"] == STEPS
    assert last_step(folder) == STEPS + STEPS // 2
