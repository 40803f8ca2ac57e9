import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastictrain.errors import ConfigError, StorageError
from elastictrain.storage.opening import open_store
from elastictrain.telemetry import loggers
from elastictrain.telemetry.loggers import LoggedRun, LoggerThread, MetricPoint, close_loggers, make_loggers
from elastictrain.telemetry.prometheus import PrometheusLogger
from elastictrain.telemetry.tensorboard import TensorBoardLogger
from tests.unit.telemetry.runs import run_of


@dataclass
class FakeLogger:
    """Fails at chosen calls, counted from 0 and repetitions included; or hangs in `log` until it is released."""

    fails: frozenset[int] = frozenset()
    hangs: threading.Event | None = None
    calls: int = 0
    opened: int = 0
    steps: list[int] = field(default_factory=list)
    complete: bool | None = None

    def _call(self) -> None:
        self.calls += 1
        if self.hangs is not None and self.opened:
            self.hangs.wait(10)
        if self.calls - 1 in self.fails:
            raise OSError("network away")

    def open(self, run: LoggedRun) -> None:
        self._call()
        self.opened += 1

    def log(self, point: MetricPoint) -> None:
        self._call()
        self.steps.append(point.step)

    def close(self, *, complete: bool) -> None:
        self._call()
        self.complete = complete


class WithOptions(FakeLogger):
    def __init__(self, *, size: int, name: str = "") -> None:
        super().__init__()
        self.size = size
        if size == 7:
            raise ValueError("size must not be 7")


class WithoutClose:
    def open(self, run: LoggedRun) -> None: ...

    def log(self, point: MetricPoint) -> None: ...


HERE = __name__


def test_none_are_made_for_an_empty_list() -> None:
    assert make_loggers([]) == []


def test_loggers_come_by_name_or_class_and_take_options(tmp_path: Path) -> None:
    made = make_loggers(
        ["tensorboard", {"_target_": "prometheus", "path": "a.prom"}, {"_target_": f"{HERE}.WithOptions", "size": 3}]
    )
    assert [(name, type(one)) for name, one in made] == [
        ("tensorboard", TensorBoardLogger),
        ("prometheus", PrometheusLogger),
        (f"{HERE}.WithOptions", WithOptions),
    ]


@pytest.mark.parametrize(
    ("chosen", "keys"),
    [
        (["jsonl"], ["telemetry.loggers[0]"]),
        (["tensorboard", "tensorbord"], ["telemetry.loggers[1]"]),
        ([{"size": 1}], ["telemetry.loggers[0]"]),
        (["no_such_module.Logger"], ["telemetry.loggers[0]"]),
        ([f"{HERE}.NoSuchClass"], ["telemetry.loggers[0]"]),
        ([f"{HERE}.WithoutClose"], ["telemetry.loggers[0]"]),
        ([f"{HERE}.run_of"], ["telemetry.loggers[0]"]),
        ([{"_target_": f"{HERE}.WithOptions"}], ["telemetry.loggers[0].size"]),
        (
            [{"_target_": f"{HERE}.WithOptions", "size": "x", "sise": 1}],
            ["telemetry.loggers[0].sise", "telemetry.loggers[0].size"],
        ),
        ([{"_target_": f"{HERE}.WithOptions", "size": 7}], ["telemetry.loggers[0]"]),
        ([{"_target_": "prometheus", "path": "a.txt"}, "jsonl"], ["telemetry.loggers[0]", "telemetry.loggers[1]"]),
        ([{"_target_": "wandb", "mode": "on"}], ["telemetry.loggers[0].mode"]),
    ],
)
def test_every_mistake_is_a_problem_of_its_key(chosen: list[str | Mapping[str, object]], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loggers(chosen)
    assert [problem.key for problem in caught.value.problems] == keys


@pytest.mark.parametrize(("name", "install"), [("wandb", "pip install wandb"), ("mlflow", "pip install mlflow")])
@pytest.mark.parametrize("folder", [False, True])
def test_a_missing_package_is_one_problem_with_the_command_that_installs_it(
    name: str, install: str, folder: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # W&B itself leaves a folder of its name in the current directory.
    if folder:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError) as caught:
        make_loggers([name])
    assert install in caught.value.problems[0].message


def test_no_package_is_imported_by_choosing_a_logger() -> None:
    before = set(sys.modules)
    make_loggers(["tensorboard", "wandb", "mlflow"])
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= {"elastictrain"}


def thread_of(target: FakeLogger, tmp_path: Path, *, total_steps: int = 100) -> LoggerThread:
    return LoggerThread("fake", target, run_of(open_store(str(tmp_path)), total_steps=total_steps), first_pause_s=0.001)


@pytest.mark.parametrize(("total_steps", "complete"), [(3, True), (4, False), (0, True)])
def test_all_points_are_written_in_order_and_the_end_is_known(tmp_path: Path, total_steps: int, complete: bool) -> None:
    target = FakeLogger()
    thread = thread_of(target, tmp_path, total_steps=total_steps)
    for step in (1, 2, 3):
        thread.log(step, {"loss/train": 1.0})
    close_loggers([thread], limit_s=10)
    assert (target.opened, target.steps, target.complete) == (1, [1, 2, 3], complete)


def test_what_fails_is_repeated_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = FakeLogger(fails=frozenset({0, 2, 3, 5}))
    thread = thread_of(target, tmp_path)
    for step in (1, 2, 3):
        thread.log(step, {"loss/train": 1.0})
    deadline_s = time.monotonic() + 10
    while len(target.steps) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    close_loggers([thread], limit_s=10)
    assert (target.opened, target.steps, target.complete) == (1, [1, 2, 3], False)
    assert len(caplog.records) == 1


def test_points_that_are_never_written_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = FakeLogger(fails=frozenset(range(1, 1000)))
    thread = thread_of(target, tmp_path)
    for step in (1, 2, 3):
        thread.log(step, {"loss/train": 1.0})
    close_loggers([thread], limit_s=10)
    assert target.complete is None
    assert caplog.records[-1].args == ("fake", 3)


def test_a_logger_that_hangs_delays_neither_steps_nor_the_end_and_keeps_the_newest_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loggers, "KEPT_POINTS", 5)
    release = threading.Event()
    target = FakeLogger(hangs=release)
    thread = thread_of(target, tmp_path)
    began_s = time.monotonic()
    for step in range(1, 11):
        thread.log(step, {"loss/train": 1.0})
        while target.calls < 2:
            time.sleep(0.001)
    close_loggers([thread], limit_s=0.02)
    assert time.monotonic() - began_s < 5
    assert caplog.records[-1].args == ("fake", 10)
    release.set()
    thread.close(10)
    # The first one was on its way.
    assert target.steps == [1, 6, 7, 8, 9, 10]


def test_the_id_of_a_run_stays_and_another_run_has_another(tmp_path: Path) -> None:
    first, again, other = (run_of(open_store(str(tmp_path / name))) for name in ("a", "a", "b"))
    assert first.read_id() == again.read_id() != other.read_id()
    (tmp_path / "a" / "telemetry" / "run_id").write_text("../../x")
    with pytest.raises(StorageError):
        first.read_id()


@pytest.mark.parametrize(("url", "name"), [("runs/llama", "llama"), ("memory://bucket/llama/", "llama")])
def test_a_run_is_named_after_its_folder(url: str, name: str) -> None:
    assert run_of(open_store(url)).name == name


def test_prometheus_reads_the_newest_values(tmp_path: Path) -> None:
    target = PrometheusLogger(path=str(tmp_path / "run.prom"))
    target.open(run_of(open_store(str(tmp_path / "llama"))))
    target.log(MetricPoint(1, 0.0, {"loss/train": 2.0, "loss/held_out": 3.0}))
    target.log(MetricPoint(2, 0.0, {"loss/train": float("nan")}))
    lines = [line for line in (tmp_path / "run.prom").read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        'elastictrain_step{run="llama"} 2.0',
        'elastictrain_loss_train{run="llama"} nan',
        'elastictrain_loss_held_out{run="llama"} 3.0',
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]
