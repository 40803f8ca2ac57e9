"""The program of docs/own-loop.md, killed, stopped and moved to another world, equals the one that nothing happens to."""

import json
import random
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torchruns import REPOSITORY, Run, events, kill, last_step, losses, rank_of, savers, started, torchrun, wait_until

import elastictrain

STEPS = 200
DOCUMENT = (REPOSITORY / "docs/own-loop.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
"""The program, and its second half as a function that is called again."""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The first program of the page; each step takes a moment, so that there is time to kill it."""
    source, _ = PROGRAMS
    memory = tmp_path / "host-memory"
    memory.mkdir()
    source = source.replace(
        '"every_steps": 20}', f'"every_steps": 20, "memory_dir": "{memory}"}}, "preflight": {{"level": "off"}}'
    )
    source = source.replace('"flush_s": 1.0', '"flush_s": 0.1')
    path = tmp_path / "own_loop.py"
    path.write_text(
        source.replace("        scheduler.step()\n", "        scheduler.step()\n        __import__('time').sleep(0.03)\n")
    )
    return path


@pytest.fixture(autouse=True)
def _no_saver_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for saver in savers(tmp_path):
        saver.kill()


@contextmanager
def run_of(program: Path, folder: Path, *, warm: bool, steps: int = STEPS, max_restarts: int = 0) -> Iterator[Run]:
    """On two ranks. Cold it imports what the program says, in its order."""
    log = folder.with_name(f"{folder.name}-log")
    with torchrun(
        [str(folder), str(steps)], world_size=2, folder=log, max_restarts=max_restarts, module=[str(program)], warm=warm
    ) as run:
        yield run


def command_of(program: Path, folder: Path, steps: int) -> list[str]:
    """Alone, as a fork."""
    return [sys.executable, "-m", program.stem, str(folder), str(steps)]


def ranks(run: Run) -> list[psutil.Process]:
    """Workers of torchrun, in order of rank."""
    found = {}
    for child in psutil.Process(run.process.pid).children(recursive=True):
        try:
            if "own_loop.py" in " ".join(child.cmdline()) and (rank := rank_of(child, program="own_loop.py")) is not None:
                found[rank] = child
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return [found[rank] for rank in sorted(found)]


def test_the_added_lines_are_few() -> None:
    assert DOCUMENT.count("  # +\n") <= 20


def test_killed_at_random_it_is_the_same_run(program: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with run_of(program, whole, warm=True) as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    chosen = random.Random(16)
    with run_of(program, killed, warm=True, max_restarts=5) as run:
        for step in (15, 90):
            wait_until(lambda least=step: last_step(killed) >= least, timeout_s=120, what=f"step {step}")  # type: ignore[misc]
            kill(chosen.choice(ranks(run)))
        assert run.wait(120) == 0, run.output()[-4000:]
    resumes = events(killed, "resume")
    assert [row["tier"] for row in resumes] == ["none", "memory", "memory"]
    assert 0 < resumes[1]["step"] < resumes[2]["step"]
    assert losses(killed) == losses(whole)
    ours, theirs = elastictrain.load(str(killed)), elastictrain.load(str(whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    manifest = json.loads((killed / f"checkpoints/step-{STEPS:09d}/manifest.json").read_text())
    assert manifest["state"]["step"] == STEPS


def test_a_notice_is_obeyed_and_another_world_goes_on(program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with run_of(program, folder, warm=False, steps=10_000) as run:
        wait_until(lambda: last_step(folder) >= 10, timeout_s=120, what="step 10")
        for worker in ranks(run):
            worker.send_signal(signal.SIGUSR1)
        run.wait(60)
    (stop,) = events(folder, "stop")
    assert (stop["exit_code"], stop["saved"], stop["saved_step"]) == (75, "storage", stop["step"])
    with started(command_of(program, folder, stop["step"] + 5), log=tmp_path / "alone.txt") as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    assert events(folder, "resume")[-1]["step"] == stop["step"]
    assert last_step(folder) == stop["step"] + 5
    assert len(list((folder / "tensorboard").iterdir())) >= 1


def test_a_state_that_only_memory_has_is_saved_under_its_step_where_no_slot_can_be_had(program: Path, tmp_path: Path) -> None:
    folder, command = tmp_path / "run", command_of(program, tmp_path / "run", 1000)
    with started(command, log=tmp_path / "log.txt") as run:
        wait_until(lambda: last_step(folder) >= 10, timeout_s=60, what="step 10")
        # It would write to storage what it has.
        for process in (psutil.Process(run.process.pid), *savers(tmp_path)):
            process.kill()
        run.process.wait(10)
    before = elastictrain_steps(folder)
    patch = "from elastictrain.train import snapshot_memory\nsnapshot_memory._choose_slots = lambda *_, **__: ()\n"
    program.write_text(patch + program.read_text().replace("run.restore() + 1", "run.restore() + 1; os._exit(0)"))
    with started(command, log=tmp_path / "log.txt") as run:
        assert run.wait(60) == 0, run.output()
    resumed = events(folder, "resume")[-1]
    assert resumed["tier"] == "memory"
    assert elastictrain_steps(folder) == [*before, resumed["step"]]


@pytest.mark.parametrize(
    ("leaves", "saved"),
    [("if step == 9: sys.exit()", 8), ("if step == 9: break", 8), ("if step == 9: raise KeyError(1)", 0)],
)
def test_a_loop_that_is_left_early_saves_what_is_done(leaves: str, saved: int, program: Path, tmp_path: Path) -> None:
    program.write_text(program.read_text().replace("        loss.backward()\n", f"        {leaves}\n        loss.backward()\n"))
    folder = tmp_path / "run"
    with started(command_of(program, folder, 20), log=tmp_path / "log.txt") as run:
        assert run.wait(60) == (0 if saved else 70), run.output()
    # After an error the saver may still write what host memory holds.
    steps = elastictrain_steps(folder)
    assert max(steps) == saved if saved else 9 not in steps


def test_an_update_that_is_not_done_is_not_saved(program: Path, tmp_path: Path) -> None:
    text = program.read_text().replace("        optimizer.step()\n", "        optimizer.step()\n        if step == 9: break\n")
    program.write_text(text)
    folder = tmp_path / "run"
    for _ in range(2):
        with started(command_of(program, folder, 20), log=tmp_path / "log.txt") as run:
            assert run.wait(60) == 0, run.output()
        assert 9 not in elastictrain_steps(folder)
    assert events(folder, "resume")[-1]["step"] == 8


def elastictrain_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints."""
    return [int(path.name[5:14]) for path in (folder / "checkpoints").glob("step-*")]


MISTAKES = {
    "before": ("elastictrain.init_process_group(folder, **options)", "torch.distributed.init_process_group('gloo')", 78),
    "key": ('"every_steps": 20', '"every_step": 20', 78),
    "logger": ('"flush_s": 0.1', '"loggers": ["jsonl"]', 78),
    "restore": ("first = run.restore() + 1", "first = 1", 64),
    "step": ("run.step_done(step,", "run.step_done(step + 1,", 64),
    "own": ("        loss.backward()", "        raise ValueError('mine')", 70),
    "twice": ("    first = run.restore() + 1", "    elastictrain.attach(folder, model=model, optimizer=None)", 78),
    "metric": ('"loss": loss', '"loss": loss.expand(3)', 64),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_with_a_code_and_a_sentence(mistake: str, program: Path, tmp_path: Path) -> None:
    right, wrong, code = MISTAKES[mistake]
    source = program.read_text()
    assert right in source
    program.write_text(source.replace(right, wrong))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if mistake == "before" else {}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if variables else {}
    command = command_of(program, tmp_path / "run", 20)
    with started(command, log=tmp_path / "log.txt", extra_environment=variables) as run:
        assert run.wait(60) == code, run.output()
        assert ("Traceback" in run.output()) == (mistake == "own")
