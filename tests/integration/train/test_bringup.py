import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from elastictrain.config.composed import RunConfig, TaskGroup
from elastictrain.distributed.group import leave
from elastictrain.errors import ConfigError, StopRequestedError, StorageError, TaskError
from elastictrain.events import Stop
from elastictrain.fault.exits import encode, identify
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity, Launcher
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.train import context as context_module
from elastictrain.train.bringup import claim_memory, form_group, meet
from elastictrain.train.checks import check_alone
from elastictrain.train.context import TrainContext
from elastictrain.train.preflight import RunPreflight
from tests.unit.train.parts import Points, Squares
from tests.unit.train.test_loop import config

ALONE = Identity(0, 1, 0, 1, "here", launched=False)


class SquaresOfPoints(Squares):
    """A task that brings its own samples."""

    def __init__(self, num_samples: int = 64) -> None:
        super().__init__()
        self._num_samples = num_samples

    def train_dataset(self) -> Points:
        return Points(self._num_samples)

    def eval_dataset(self) -> None:
        return None


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def of(folder: Path | str, **options: object) -> RunConfig:
    plain = config(steps=5)
    target = f"{SquaresOfPoints.__module__}.{SquaresOfPoints.__qualname__}"
    run = dataclasses.replace(plain.run, dir=str(folder))
    return dataclasses.replace(plain, run=run, task=TaskGroup(target=target, options=options))


class Life:
    """One incarnation of a world of one."""

    def __init__(self, config: RunConfig, *, stop: StopRequest | None = None, identity: Identity = ALONE) -> None:
        self._config = config
        self._identity = identity
        self._stop = stop
        self.tracker = ProgressTracker()
        self.context: TrainContext | None = None

    def meet(self) -> TrainContext:
        context = check_alone(self._config, self._identity, tracker=self.tracker, stop_request=lambda: self._stop)
        claim_memory(context)
        meet(context)
        self.context = context
        return context

    def begin(self) -> TrainContext:
        context = self.meet()
        form_group(context)
        return context

    def close(self) -> None:
        if self.context is not None:
            self.context.heartbeats.close()
            self.context.journal.close()


def test_a_group_comes_up_and_failures_can_be_recorded_before_it_does(tmp_path: Path) -> None:
    names = []
    for number in (1, 2):
        life = Life(of(tmp_path / "run"))
        started = life.meet()
        assert (life.tracker.mark.phase, dist.is_initialized()) == (Phase.RENDEZVOUS, False)
        stop = Stop(step=number, reason="done", exit_code=0, seconds=1.0, saved="storage", saved_step=number)
        started.journal.record(stop)
        form_group(started)
        assert life.tracker.mark.phase == Phase.PREFLIGHT
        assert [*started.times.seconds] == [
            "loggers", "device", "task", "run_folder", "data", "predecessors", "memory", "rendezvous", "preflight", "group",
            "preflight_group",
        ]  # fmt: skip
        assert len(started.samples.train) == 64
        (introduction,) = started.generation.ranks
        assert (introduction.host, introduction.local_world_size, introduction.backend) == ("here", 1, "gloo")
        name = started.generation.name
        (line,) = (tmp_path / "run" / "events" / f"{name}-r00000.jsonl").read_text().splitlines()
        assert (json.loads(line)["step"], json.loads(line)["incarnation"]) == (number, name)
        names.append(name)
        life.close()
        leave(started.group)
    assert [name[:7] for name in names] == ["000001-", "000002-"]


def test_what_compiles_is_imported_while_the_preflight_examines_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(context_module, "prepare_compiler", lambda: calls.append("prepared"))

    def check_group(self: RunPreflight, *, in_background: Callable[[], None], **_: object) -> None:
        assert not calls
        in_background()

    monkeypatch.setattr(RunPreflight, "check_group", check_group)
    for compiles, expected in ((True, ["prepared"]), (False, [])):
        plain = of(tmp_path / "run")
        life = Life(dataclasses.replace(plain, train=dataclasses.replace(plain.train, compile=compiles)))
        leave(life.begin().group)
        life.close()
        assert calls == expected
        calls.clear()


def test_the_environment_of_torch_is_set_before_the_group_exists(tmp_path: Path) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
    os.environ.pop("TORCH_FR_DUMP_TEMP_FILE", None)
    life = Life(of(tmp_path / "run"))
    leave(life.begin().group)
    life.close()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].startswith(f"{tempfile.gettempdir()}/elastictrain-")


def test_a_stop_before_training_is_obeyed_where_ranks_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Alone, nobody is waited for: so the go never comes here.
    real = dist.HashStore.set
    monkeypatch.setattr(dist.HashStore, "set", lambda self, key, value: None if "/go/" in key else real(self, key, value))
    life = Life(of(tmp_path / "run"), stop=StopRequest("SIGUSR1", time.monotonic()))
    with pytest.raises(StopRequestedError, match="SIGUSR1"):
        life.begin()
    assert life.context is None


def after_this_process() -> Identity:
    own = identify(os.getpid())
    assert own is not None
    return dataclasses.replace(ALONE, launcher=Launcher(1, 2, True, "/tmp/x", previous_workers=encode([own])))


def test_who_does_not_let_go_of_what_this_start_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastictrain.fault.exits.PREVIOUS_EXIT_TIMEOUT_S", 0.3)
    life = Life(of(tmp_path / "run"), identity=after_this_process())
    started = life.begin()
    assert started.times.seconds["predecessors"] >= 0.3
    (warning,) = [record for record in caplog.records if record.name == "elastictrain.train.bringup"]
    assert warning.args == (str(os.getpid()),)
    leave(started.group)
    life.close()


def test_a_stop_is_obeyed_where_others_do_not_let_go(tmp_path: Path) -> None:
    life = Life(of(tmp_path / "run"), stop=StopRequest("SIGUSR1", time.monotonic()), identity=after_this_process())
    with pytest.raises(StopRequestedError):
        life.begin()
    assert life.context is None


@pytest.mark.parametrize("trouble", ["no samples", "no folder"])
def test_what_can_be_checked_alone_is_checked_before_anybody_is_met(tmp_path: Path, trouble: str) -> None:
    (tmp_path / "file").write_text("")
    if trouble == "no samples":
        life, kind = Life(of(tmp_path / "run", num_samples=0)), TaskError
    else:
        life, kind = Life(of(tmp_path / "file" / "run")), StorageError
    with pytest.raises(kind, match="train_dataset" if kind is TaskError else r"`run\.dir`"):
        life.begin()
    assert life.context is None
    assert life.tracker.mark.phase == Phase.START
    assert not dist.is_initialized()


def test_checkpointing_without_blocks_is_refused_and_not_ignored(tmp_path: Path) -> None:
    plain = of(tmp_path)
    wanted = dataclasses.replace(plain, train=dataclasses.replace(plain.train, activation_checkpointing="full"))
    with pytest.raises(ConfigError, match=r"`train\.activation_checkpointing`"):
        Life(wanted).begin()
