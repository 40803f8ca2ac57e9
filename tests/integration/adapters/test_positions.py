"""What an adapter refuses, and where it places a loop, with the real frameworks in one process."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

from elastictrain.adapters import framework_loop
from elastictrain.adapters.framework_loop import FrameworkLoop
from elastictrain.errors import ConfigError, UsageError


@pytest.fixture
def huggingface() -> Any:
    return pytest.importorskip("elastictrain.adapters.huggingface")


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("elastictrain.adapters.lightning")


@pytest.mark.parametrize(("module", "package"), [("huggingface", "transformers"), ("lightning", "lightning.pytorch")])
def test_a_missing_package_is_named(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"elastictrain.adapters.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package.partition('.')[0]}"):
        importlib.import_module(f"elastictrain.adapters.{module}")


def loop_in(world_size: int, monkeypatch: pytest.MonkeyPatch) -> FrameworkLoop:
    """A loop in a run of so many ranks."""
    session = SimpleNamespace(context=SimpleNamespace(identity=SimpleNamespace(world_size=world_size)))
    monkeypatch.setattr(framework_loop, "present_session", lambda: session)
    return FrameworkLoop(None, "runs/mine", None, {})


def test_a_framework_that_does_not_see_the_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, model = loop_in(2, monkeypatch), nn.Linear(1, 1)
    with pytest.raises(ConfigError) as refused:
        loop.restore(model, torch.optim.SGD(model.parameters()), nn.Linear(1, 1), world_size=1)
    assert [problem.key for problem in refused.value.problems] == ["Trainer"]


def test_a_model_of_fsdp_1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, model, part = loop_in(1, monkeypatch), nn.Linear(1, 1), FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(part)
    model.add_module("part", part)
    with pytest.raises(ConfigError) as refused:
        loop.restore(model, torch.optim.SGD([model.weight]), part, world_size=1)
    assert [problem.key for problem in refused.value.problems] == ["model"]


@pytest.mark.parametrize(("attached", "error", "left"), [(False, None, 1), (True, None, 0), (False, SystemExit(3), 1)])
def test_a_session_without_training_is_left(
    attached: bool, error: SystemExit | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[object] = []
    run = SimpleNamespace(__exit__=lambda kind, error, trace: exits.append(error))
    monkeypatch.setattr(framework_loop, "present_session", lambda: SimpleNamespace(attached=attached))
    monkeypatch.setattr(framework_loop, "attach", lambda url, **_: run)
    FrameworkLoop(None, "runs/mine", None, {}).close(type(error) if error else None, error, None)
    assert exits == [error] * left


def trainer_of(samples: int) -> Any:
    """A Trainer, as far as its position is concerned."""
    return SimpleNamespace(
        args=None,
        state=SimpleNamespace(
            epoch=0.0,
            global_step=0,
            num_input_tokens_seen=0,
            total_flos=0.0,
            best_metric=None,
            best_global_step=None,
            best_model_checkpoint=None,
            max_steps=10,
        ),
        control=SimpleNamespace(should_training_stop=False),
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)),
        accelerator=SimpleNamespace(scaler=None),
        callback_handler=SimpleNamespace(callbacks=[]),
        get_total_train_batch_size=lambda args: samples,
    )


def test_a_trainer_goes_on_with_the_same_samples_per_step_alone(huggingface: Any) -> None:
    before, after, other = trainer_of(16), trainer_of(16), trainer_of(8)
    before.state.global_step, before.control.should_training_stop = 4, True
    saved = huggingface._TrainerPosition(before, steps_per_epoch=5).state_dict()
    huggingface._TrainerPosition(after, steps_per_epoch=5).load_state_dict(saved)
    assert (after.state.global_step, after.control.should_training_stop) == (4, True)
    with pytest.raises(ConfigError) as refused:
        huggingface._TrainerPosition(other, steps_per_epoch=5).load_state_dict(saved)
    assert [problem.key for problem in refused.value.problems] == ["TrainingArguments"]
    with pytest.raises(ConfigError) as refused:
        huggingface._TrainerPosition(after, steps_per_epoch=6).load_state_dict(saved)
    assert [problem.key for problem in refused.value.problems] == ["train_dataset"]


def test_a_trainer_that_has_made_all_its_steps_has_not_stopped_early(huggingface: Any) -> None:
    trainer = trainer_of(16)
    trainer.state.global_step, trainer.control.should_training_stop = 10, True
    assert huggingface._TrainerPosition(trainer, steps_per_epoch=5).state_dict()["stopped_early"] is False


def test_a_callback_that_is_not_entered_is_refused(huggingface: Any) -> None:
    callback = huggingface.ElasticTrainerCallback("runs/mine")
    with pytest.raises(UsageError, match="ElasticTrainerCallback"):
        callback.on_step_begin(None, None, None)


def fit_of(*loaders: object, accumulate: int = 1) -> Any:
    """A Lightning trainer, as far as its loaders are concerned."""
    return SimpleNamespace(
        world_size=2,
        accumulate_grad_batches=accumulate,
        fit_loop=SimpleNamespace(
            _combined_loader=SimpleNamespace(flattened=list(loaders), _mode="max_size_cycle"),
            epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0)),
        ),
    )


def loader_of(batch_size: int) -> Any:
    return DataLoader(TensorDataset(torch.arange(12)), batch_size=batch_size)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(2, 1), (4, 2)])
def test_lightning_goes_on_with_the_same_batches_alone(lightning: Any, batch_size: int, accumulate: int) -> None:
    position = lightning._FitPosition(fit_of(loader_of(4)))
    position.place_loaders(int, within_epoch=False)
    position._trainer = fit_of(loader_of(4))
    position.place_loaders(int, within_epoch=False)
    position._trainer = fit_of(loader_of(batch_size), accumulate=accumulate)
    with pytest.raises(ConfigError) as refused:
        position.place_loaders(int, within_epoch=False)
    assert [problem.key for problem in refused.value.problems] == ["train_dataloader"]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class OwnBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    "loader", [DataLoader(Endless()), DataLoader(TensorDataset(torch.arange(4)), batch_sampler=OwnBatches()), [1, 2]]
)
def test_a_loader_without_a_sampler_is_refused(lightning: Any, loader: object) -> None:
    with pytest.raises(ConfigError) as refused:
        lightning._FitPosition(fit_of(loader)).place_loaders(int, within_epoch=False)
    assert [problem.key for problem in refused.value.problems] == ["train_dataloader"]


@pytest.mark.parametrize(("automatic", "optimizers"), [(False, 1), (True, 2)])
def test_several_optimizers_are_refused(lightning: Any, automatic: bool, optimizers: int) -> None:
    callback = lightning.ElasticLightningCallback("runs/mine")
    with pytest.raises(ConfigError):
        callback.on_fit_start(
            SimpleNamespace(optimizers=[None] * optimizers), SimpleNamespace(automatic_optimization=automatic)
        )


def test_an_epoch_is_gone_on_with_once(lightning: Any) -> None:
    batches = BatchSampler(SequentialSampler(range(10)), batch_size=3, drop_last=False)
    batches.sampler = lightning._EpochOrder(batches.sampler, int, 6)
    assert list(batches) == [[6, 7, 8], [9]]
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(batches) == 4


def test_scores_of_callbacks_come_back_as_tensors(lightning: Any) -> None:
    state = {"early": {"best": torch.tensor(0.1), "count": 3, "reason": None}, "counts": {"n": torch.tensor(2)}}
    plain = lightning._without_tensors(state)
    assert plain["early"] == {"best": {"number": pytest.approx(0.1), "dtype": "torch.float32"}, "count": 3, "reason": None}
    again = lightning._with_tensors(plain)
    assert torch.equal(again["early"]["best"], state["early"]["best"])
    assert again["counts"]["n"].dtype == torch.int64
