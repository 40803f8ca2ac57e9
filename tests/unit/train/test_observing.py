import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastictrain.config.load import load
from elastictrain.events import Resume, Step
from elastictrain.storage.opening import open_store
from elastictrain.telemetry import host_metrics
from elastictrain.train import observing
from elastictrain.train.evaluate import Evaluation
from elastictrain.train.observing import Curves, LogRankObserver
from tests.unit.train.parts import context_of

GENERATION = SimpleNamespace(name="000007-abcdef01")
RESUME = Resume(step=4, tier="storage", checkpoint="step-000000004", bytes=1, seconds={})


def step(number: int, tokens_per_s: float) -> Step:
    return Step(
        step=number,
        loss=1.0,
        lr=2.0,
        grad_norm=3.0,
        positions=(0, 1),
        samples_per_s=tokens_per_s / 10,
        tokens_per_s=tokens_per_s,
        metrics={"accuracy": 0.5},
    )


@pytest.mark.parametrize(("resume", "said"), [(RESUME, "step 4"), (Resume(0, "none", None, 0, {}), "step 0")])
def test_a_start_says_from_which_step(resume: Resume, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(["recipe=llama_tiny", f"run.dir={tmp_path}", "telemetry.loggers=[]"], with_task=False)
    context = context_of(config=config, store=open_store(str(tmp_path)), generation=GENERATION, began=0.0)
    LogRankObserver(context, resume, flops_per_token=None).close()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flops_per_token", [None, 1e9])
def test_the_first_step_each_interval_and_the_last_have_every_figure_that_is_known(
    flops_per_token: float | None, tmp_path: Path
) -> None:
    arguments = ["recipe=llama_tiny", f"run.dir={tmp_path}", "telemetry.log_every_steps=8", "telemetry.peak_tflops=1"]
    config = load([*arguments, "train.steps=10"], with_task=False)
    context = context_of(config=config, store=open_store(str(tmp_path)), generation=GENERATION, began=0.0)
    observer = LogRankObserver(context, RESUME, flops_per_token=flops_per_token)
    observer.on_step(step(5, 10.0), step_s=2.0, skipped_total=1)
    for number, tokens_per_s in ((6, 100.0), (7, 200.0), (8, 300.0)):
        observer.on_step(step(number, tokens_per_s), step_s=1.0, skipped_total=2)
    observer.on_eval(8, Evaluation(0.5, {"accuracy": 0.75}))
    for number in (9, 10):
        observer.on_step(step(number, 400.0), step_s=1.0, skipped_total=2)
    observer.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    points = {tag: [(point.step, point.value) for point in curves.Scalars(tag)] for tag in curves.Tags()["scalars"]}
    mfu = points.pop("speed/mfu", None)
    # They come as soon as the run's record is read.
    for tag in ("run/goodput", "run/restarts", "run/lost_steps"):
        points.pop(tag, None)
    assert {tag: found for tag, found in points.items() if not tag.startswith("system/")} == {
        "loss/train": [(5, 1.0), (8, 1.0), (10, 1.0)],
        "loss/held_out": [(8, 0.5)],
        "accuracy/train": [(5, 0.5), (8, 0.5), (10, 0.5)],
        "accuracy/held_out": [(8, 0.75)],
        "optimizer/lr": [(5, 2.0), (8, 2.0), (10, 2.0)],
        "optimizer/grad_norm": [(5, 3.0), (8, 3.0), (10, 3.0)],
        "optimizer/skipped": [(5, 1.0), (8, 2.0), (10, 2.0)],
        # Means since the last logged step.
        "speed/tokens_per_s": [(5, 10.0), (8, 200.0), (10, 400.0)],
        "run/world_size": [(5, 1.0), (8, 1.0), (10, 1.0)],
        "run/generation": [(5, 7.0), (8, 7.0), (10, 7.0)],
        "speed/samples_per_s": [(5, 1.0), (8, 20.0), (10, 40.0)],
        "speed/step_s": [(5, 2.0), (8, 1.0), (10, 1.0)],
    }
    assert mfu == (
        None if flops_per_token is None else [(5, pytest.approx(0.01)), (8, pytest.approx(0.2)), (10, pytest.approx(0.4))]
    )


def test_a_point_has_the_share_in_which_the_device_was_busy_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = threading.Event()

    def utilization(_: torch.device) -> int:
        sampled.set()
        return 42

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(host_metrics, "find_spec", lambda _: object())
    monkeypatch.setattr(observing, "host_scalars", lambda _: {})
    config = load(["recipe=llama_tiny", f"run.dir={tmp_path}"], with_task=False)
    group = SimpleNamespace(device=torch.device("cuda", 0))
    context = context_of(config=config, store=open_store(str(tmp_path)), generation=GENERATION, began=0.0, group=group)
    curves = Curves(context, first_step=1, total_steps=3)
    assert not sampled.wait(0.05), "nobody has asked"
    curves.log(1, {})
    assert sampled.wait(10)
    sampled.clear()
    curves.log(2, {}, with_host=False)
    assert not sampled.wait(0.05)
    curves.log(3, {})
    curves.close()
    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    assert [(point.step, point.value) for point in written.Scalars("system/device_busy_percent")] == [(3, 42.0)]


def test_without_loggers_neither_host_nor_device_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(observing, "host_scalars", lambda device: asked.append(device) or {})
    monkeypatch.setattr(torch.cuda, "utilization", asked.append)
    monkeypatch.setattr(host_metrics, "find_spec", lambda _: object())
    config = load(["recipe=llama_tiny", f"run.dir={tmp_path}", "telemetry.loggers=[]"], with_task=False)
    group = SimpleNamespace(device=torch.device("cuda", 0))
    context = context_of(config=config, store=open_store(str(tmp_path)), generation=GENERATION, began=0.0, group=group)
    curves = Curves(context, first_step=1, total_steps=3)
    curves.log(1, {})
    curves.close()
    assert asked == []
