"""Lightning's `Trainer.fit` as a run: snapshots, checkpoints, agreed stops and restarts at the same batch."""

import signal
from collections.abc import Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from elastictrain.adapters.framework_loop import FrameworkLoop
from elastictrain.errors import ConfigError, Problem

try:
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    message = f"elastictrain.adapters.lightning needs the package lightning ({missing}): pip install lightning"
    raise ModuleNotFoundError(message) from None


class ElasticLightningCallback(Callback):
    """Ties `Trainer.fit` to the run in the folder `url`. Enter it before the Trainer is made, which uses its process group:

        with ElasticLightningCallback("runs/mine") as elastic:
            trainer = Trainer(callbacks=[elastic], enable_checkpointing=False, ...)
            trainer.fit(module, loader)

    `extra` and `options`: as for `elastictrain.attach`. `fit` raises SystemExit with 75 once the ranks have agreed to stop.
    Left, the run is closed, and its process group is gone."""

    def __init__(self, url: str, *, extra: Mapping[str, object] | None = None, **options: Mapping[str, Any]) -> None:
        self._loop = FrameworkLoop(url, extra, options)
        self._position: _FitPosition | None = None
        self._handler: Any = None  # of SIGTERM

    def __enter__(self) -> Self:
        self._loop.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.close(kind, error, trace)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises: ConfigError; as `elastictrain.attach`."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            message = "must have one optimizer, and automatic_optimization: for several write a loop with elastictrain.attach"
            raise ConfigError([Problem(type(pl_module).__name__, message)])
        self._handler = signal.getsignal(signal.SIGTERM)
        self._position = _FitPosition(trainer)
        self._loop.restore(pl_module, trainer.optimizers[0], self._position, world_size=trainer.world_size)
        self._loop.begin_epoch(0)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signal_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises: ConfigError if a loader has no position, or a batch other samples than in the run so far."""
        self._take_signal_back()
        assert self._position is not None  # noqa: S101
        self._position.check_batches()
        if self._position.resumed:
            self._loop.begin_epoch(self._position.epoch)
            self._position.place_loaders()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > 0:
            self._loop.begin_epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._loop.begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        position = self._position
        if position is None or trainer.global_step == position.step:
            return
        # Here, before validation, Lightning's loops can be gone on with.
        position.take_loops()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loop.updated(position.step, {"loss": loss} if isinstance(loss, Tensor) else {})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loop.end_training()

    def _take_signal_back(self) -> None:
        """Lightning's handler broadcasts, in the middle of other collectives."""
        signal.signal(signal.SIGTERM, self._handler)


class _Remainder(Sampler[int]):
    """A sampler, whose next iterator leaves out its first samples."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[int]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self._sampler), skipped, None)

    def __len__(self) -> int:
        return len(self._sampler)


class _FitPosition:
    """What a Trainer keeps beside its model and optimizer, between two steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step = 0
        self.resumed = False
        self._loops: dict[str, Any] = {}
        self._between_epochs = False
        self._batches: list[int] | None = None  # samples of a batch over all ranks, and batches of a step

    @property
    def epoch(self) -> int:
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    def state_dict(self) -> dict[str, object]:
        trainer = self._trainer
        return {
            "step": self.step,
            "loops": self._loops,
            "between_epochs": self._between_epochs,
            "batches": self._batches,
            "stopped_early": trainer.should_stop,
            "precision": trainer.precision_plugin.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": _without_tensors({one.state_key: state for one in trainer.callbacks if (state := one.state_dict())}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        trainer, self.resumed = self._trainer, True
        self.step, self._loops, self._batches = saved["step"], saved["loops"], saved["batches"]
        self._between_epochs = saved["between_epochs"]
        trainer.fit_loop.load_state_dict(self._loops)
        if self._between_epochs:
            trainer.fit_loop.restarting = False
        trainer.should_stop = saved["stopped_early"]
        trainer.precision_plugin.load_state_dict(saved["precision"])
        for config, state in zip(trainer.lr_scheduler_configs, saved["schedulers"], strict=True):
            config.scheduler.load_state_dict(dict(state))
        states = _with_tensors(saved["callbacks"])
        for one in trainer.callbacks:
            if one.state_key in states:
                one.load_state_dict(states[one.state_key])

    def take_loops(self) -> None:
        """At the end of a step's last batch."""
        self.step, self._between_epochs = self._trainer.global_step, self._trainer.is_last_batch
        loops = self._loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # of this rank alone
        loops.pop("epoch_loop.val_loop.batch_progress", None)  # over when a step is done
        if self._between_epochs:
            # As it will be when the epoch is over. Lightning would do its end again.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
            loops["epoch_loop.batch_progress"]["total"]["completed"] += 1
            for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
                counts["processed"] = counts["completed"] = counts["started"]

    def check_batches(self) -> None:
        sizes = []
        for loader in self._trainer.fit_loop._combined_loader.flattened:
            sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
            # torch gives an iterable dataset a sampler that means nothing.
            if not isinstance(sampler, BatchSampler) or isinstance(loader.dataset, IterableDataset):
                message = "must be a DataLoader with a sampler over a dataset with a length: the sampler is the run's position"
                raise ConfigError([Problem("train_dataloader", message)])
            sizes.append(sampler.batch_size * self._trainer.world_size)
        batches = [*sizes, self._trainer.accumulate_grad_batches]
        if self._batches is not None and batches != self._batches:
            message = "batch_size x ranks, and accumulate_grad_batches, must be {} as in the run so far, but are {}"
            raise ConfigError([Problem("train_dataloader", message.format(self._batches, batches))])
        self._batches = batches

    def place_loaders(self) -> None:
        """Where the run goes on: Lightning goes on with its counters, but begins an epoch's data anew."""
        fit_loop = self._trainer.fit_loop
        progress = fit_loop.epoch_loop.batch_progress
        for loader in fit_loop._combined_loader.flattened:
            _set_sampler_epoch(loader, self.epoch)
            sampler = loader.batch_sampler
            skipped = 0 if self._between_epochs else progress.current.ready * sampler.batch_size
            sampler.sampler = _Remainder(sampler.sampler, skipped)
        iter(fit_loop._data_fetcher)


def _without_tensors(state: Any) -> Any:
    """The best score of a callback is a tensor in some steps, and None in others: snapshots have no place for that."""
    if isinstance(state, Mapping):
        return {name: _without_tensors(value) for name, value in state.items()}
    return {"number": state.item(), "dtype": str(state.dtype)} if isinstance(state, Tensor) and not state.ndim else state


def _with_tensors(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if state.keys() == {"number", "dtype"}:
        return torch.tensor(state["number"], dtype=getattr(torch, state["dtype"].removeprefix("torch.")))
    return {name: _with_tensors(value) for name, value in state.items()}
