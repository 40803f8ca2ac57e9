"""Training that is stopped after a step and gone on with by another Trainer, in one process."""

import contextlib
import copy
import signal
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastictrain.adapters.framework_loop import FrameworkLoop
from elastictrain.errors import ConfigError
from elastictrain.train.parameters import seed_everything

SAMPLES = 44
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning has advice on loaders


@pytest.fixture(scope="module", autouse=True)
def frameworks() -> None:
    """Not imported above: that takes longer than all other imports together, and each worker of pytest collects each file."""
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")


class MemoryLoop(FrameworkLoop):
    """A run that keeps the state after one step alone, and then stops."""

    def __init__(self, saved: Mapping[str, Any] | None, stop_after: int | None) -> None:
        super().__init__(self, "", None, {})
        self.saved: Any = saved
        self._stop_after = stop_after

    def restore(self, model: Any, optimizer: Any, position: Any, *, world_size: int) -> int:
        self._parts = {"model": model, "optimizer": optimizer, "position": position}
        if self.saved is None:
            return 0
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self.saved[name]))
        return int(self.saved["step"])

    def begin_epoch(self, epoch: int) -> int:
        seed_everything(1000 + epoch)
        return 1000 + epoch

    def begin_step(self) -> None:
        self.finish_step()

    def finish_step(self) -> None:
        step, self._updated = self._updated, None
        if step is not None and step == self._stop_after:
            self.saved = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}
            self.saved["step"] = step
            raise SystemExit(75)

    def end_training(self) -> None:
        self.finish_step()


@cache
def module_class() -> type[Any]:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self, plateau: bool) -> None:
            super().__init__()
            self.layer, self.plateau, self.trace = nn.Linear(1, 1), plateau, []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            samples = torch.cat([part for (part,) in (batch.values() if isinstance(batch, dict) else [batch])])
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.trace.append((self.trainer.global_step, samples.flatten().tolist(), rate))
            return self.layer(samples / SAMPLES).mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held_out", torch.tensor(1.0))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            if not self.plateau:
                return optimizer
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "held_out"}}

    return Module


def dataset(samples: int = SAMPLES) -> Any:
    return TensorDataset(torch.arange(float(samples))[:, None])


def fit(
    loader: Any, *, saved: Any = None, stop_after: int | None = None, plateau: bool = False, **options: Any
) -> tuple[list[Any], Any]:
    """Returns the trace of its steps, and the state if it has stopped."""
    from lightning.pytorch import Trainer

    from elastictrain.adapters.lightning import ElasticLightningCallback

    callback, module = ElasticLightningCallback("runs/mine"), module_class()(plateau)
    loop = callback._loop = MemoryLoop(saved, stop_after)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=[callback], accelerator="cpu", devices=1, max_epochs=3, **settings, **options)
    with contextlib.suppress(SystemExit):
        trainer.fit(module, loader, DataLoader(dataset(4), batch_size=4))
    return module.trace, loop.saved


def shuffled() -> Any:
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def with_generator() -> Any:
    return DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def weighted() -> Any:
    sampler = WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES, generator=torch.Generator().manual_seed(3))
    return DataLoader(dataset(), batch_size=4, sampler=sampler)


def replaced() -> Any:
    return DataLoader(dataset(), batch_size=4, sampler=RandomSampler(dataset(), replacement=True))


def two_loaders() -> Any:
    return {"long": shuffled(), "short": DataLoader(dataset(12), batch_size=4, shuffle=True)}


# Steps 11 and 22 end an epoch.
@pytest.mark.parametrize("make", [shuffled, with_generator, weighted, replaced, two_loaders])
@pytest.mark.parametrize("stop_after", [4, 11, 17])
def test_a_fit_goes_on_with_the_same_samples(make: Any, stop_after: int) -> None:
    whole, _ = fit(make(), val_check_interval=4)
    before, saved = fit(make(), val_check_interval=4, stop_after=stop_after)
    after, _ = fit(make(), val_check_interval=4, saved=saved)
    assert len(whole) == 33
    assert before + after == whole


def test_epochs_differ_in_their_order() -> None:
    trace, _ = fit(shuffled())
    epochs = [[sample for _, samples, _ in trace[first : first + 11] for sample in samples] for first in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_loaders_that_are_loaded_again_keep_their_order() -> None:
    whole, _ = fit(shuffled(), reload_dataloaders_every_n_epochs=1)
    before, saved = fit(shuffled(), reload_dataloaders_every_n_epochs=1, stop_after=17)
    assert before + fit(shuffled(), reload_dataloaders_every_n_epochs=1, saved=saved)[0] == whole


@pytest.mark.parametrize("stop_after", [4, 11, 17])
def test_a_scheduler_that_follows_a_metric_makes_each_of_its_steps(stop_after: int) -> None:
    whole, _ = fit(shuffled(), plateau=True)
    before, saved = fit(shuffled(), plateau=True, stop_after=stop_after)
    after, _ = fit(shuffled(), plateau=True, saved=saved)
    assert {rate for _, _, rate in whole} == {1.0, 0.5}
    assert before + after == whole


def larger() -> Any:
    return DataLoader(dataset(2 * SAMPLES), batch_size=4, shuffle=True)


@pytest.mark.parametrize("other", [larger, weighted])
def test_an_epoch_keeps_its_sampler_and_its_length(other: Any) -> None:
    _, within = fit(shuffled(), stop_after=4)
    with pytest.raises(ConfigError) as refused:
        fit(other(), saved=within)
    assert [problem.key for problem in refused.value.problems] == ["train_dataloader"]
    _, between = fit(shuffled(), stop_after=11)
    fit(other(), saved=between)


class Backwards(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


def test_a_batch_sampler_with_an_order_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        fit(DataLoader(dataset(), batch_sampler=Backwards(RandomSampler(dataset()), 4, False)))
    assert [problem.key for problem in refused.value.problems] == ["train_dataloader"]


class Watching(DataLoader[Any]):
    def __iter__(self) -> Any:
        self.handlers = [*vars(self).get("handlers", []), signal.getsignal(signal.SIGTERM)]
        return super().__iter__()


def test_lightning_handles_no_signal() -> None:
    loader = Watching(dataset(), batch_size=4)
    fit(loader, stop_after=1, num_sanity_val_steps=0)
    # Lightning's own, before training starts, and that of the adapter.
    assert loader.handlers == [signal.getsignal(signal.SIGTERM)] * 2


@pytest.mark.parametrize("sampler", [RandomSampler(dataset()), SequentialSampler(dataset())])
def test_a_lone_rank_makes_the_batches_of_two(sampler: Any) -> None:
    from elastictrain.adapters.lightning import _as_on_several_ranks

    shuffle = isinstance(sampler, RandomSampler)
    two = [DistributedSampler(dataset(), num_replicas=2, rank=rank, shuffle=shuffle) for rank in range(2)]
    lone = _as_on_several_ranks(sampler)
    for one in (lone, *two):
        one.set_epoch(1)
    first, second = (list(BatchSampler(one, 4, False)) for one in two)
    expected = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    assert [sorted(batch) for batch in BatchSampler(lone, 8, False)] == expected


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(samples[:, None] / SAMPLES).mean()}


@cache
def tracing_trainer() -> type[Any]:
    import transformers

    class Tracing(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.trace.append((self.state.global_step, inputs["samples"].tolist()))
            return super().training_step(model, inputs, *args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self.trace.append((self.state.global_step, "evaluated"))
            return {}

    return Tracing


class Passes(IterableDataset[dict[str, float]]):
    def __iter__(self) -> Iterator[dict[str, float]]:
        return ({"samples": float(sample)} for sample in range(SAMPLES))


def rows(samples: int = SAMPLES) -> list[dict[str, float]]:
    return [{"samples": float(sample)} for sample in range(samples)]


def train(
    folder: Path, data: Any, *, saved: Any = None, stop_after: int | None = None, batch: int = 4, **options: Any
) -> tuple[list[Any], Any]:
    """As `fit`, with a Trainer of transformers."""
    import transformers

    from elastictrain.adapters.huggingface import ElasticTrainerCallback

    callback = ElasticTrainerCallback("runs/mine")
    loop = callback._loop = MemoryLoop(saved, stop_after)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        per_device_train_batch_size=batch,
        **options,
    )
    trainer = tracing_trainer()(Line(), arguments, train_dataset=data, eval_dataset=rows(4))
    trainer.trace = []
    with contextlib.suppress(SystemExit):
        callback.train(trainer)
    return trainer.trace, loop.saved


@pytest.mark.parametrize("stop_after", [4, 11, 17])
def test_a_trainer_goes_on_with_the_same_samples_and_evaluations(tmp_path: Path, stop_after: int) -> None:
    options = {"num_train_epochs": 2, "eval_on_start": True}
    whole, _ = train(tmp_path, rows(), **options)
    before, saved = train(tmp_path, rows(), stop_after=stop_after, **options)
    after, _ = train(tmp_path, rows(), saved=saved, **options)
    assert len(whole) == 23
    assert before + after == whole


def test_a_dataset_without_a_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, Passes(), max_steps=15)
    assert [problem.key for problem in refused.value.problems] == ["train_dataset"]


def test_a_trainer_keeps_the_length_of_its_epochs(tmp_path: Path) -> None:
    _, saved = train(tmp_path, rows(), stop_after=4)
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, rows(2 * SAMPLES), saved=saved)
    assert [problem.key for problem in refused.value.problems] == ["train_dataset"]
