"""Lightning's `Trainer.fit` as a run: snapshots, checkpoints, agreed stops and restarts at the same batch."""

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from elastictrain.adapters.framework_loop import EntersRun, FrameworkLoop
from elastictrain.errors import ConfigError, Problem

try:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    message = f"elastictrain.adapters.lightning needs the package lightning ({missing}): pip install lightning"
    raise ModuleNotFoundError(message) from None


class ElasticLightningCallback(EntersRun, Callback):
    """Ties `Trainer.fit` to the run in the folder `url`. Enter it before the Trainer is made, which uses its process group:

        with ElasticLightningCallback("runs/mine") as elastic:
            trainer = Trainer(callbacks=[elastic], enable_checkpointing=False, ...)
            trainer.fit(module, loader)

    `extra` and `options`: as for `elastictrain.attach`. `fit` raises SystemExit with 75 once the ranks have agreed to stop.
    Left, the run is closed, and its process group is gone."""

    def __init__(self, url: str, *, extra: Mapping[str, object] | None = None, **options: Mapping[str, Any]) -> None:
        self._loop = FrameworkLoop(self, url, extra, options)
        self._position: _FitPosition | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises: ConfigError; as `elastictrain.attach`."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            message = "must have one optimizer, and automatic_optimization: for several write a loop with elastictrain.attach"
            raise ConfigError([Problem(type(pl_module).__name__, message)])
        # Lightning's handler of SIGTERM broadcasts, in the middle of other collectives.
        vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
        self._position = _FitPosition(trainer)
        self._loop.restore(pl_module, trainer.optimizers[0], self._position, world_size=trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises: ConfigError if a loader has no position, or a batch other samples than in the run so far."""
        assert self._position is not None  # noqa: S101
        assert trainer.fit_loop._data_fetcher is not None  # noqa: S101
        self._loop.begin_epoch(self._position.epoch)
        self._position.place_loaders(self._loop.begin_epoch, within_epoch=self._position.within_epoch)
        # Lightning made iterators before it called the first callback of training.
        iter(trainer.fit_loop._data_fetcher)
        # Schedulers that follow a metric would leave out their step at the end of this epoch.
        trainer.fit_loop._restarting = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > 0 and self._position is not None:
            self._loop.begin_epoch(trainer.current_epoch)
            # They may have been loaded again.
            self._position.place_loaders(self._loop.begin_epoch, within_epoch=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._loop.begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Once a step's update is made: take the position of the loops, and the loss of its last batch as the step's."""
        position = self._position
        if position is None or trainer.global_step == position.step:
            return
        # Here, before validation, Lightning's loops can be gone on with.
        position.take_loops()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loop.updated(position.step, {"loss": loss} if isinstance(loss, Tensor) else {})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loop.end_training()


class _EpochOrder(Sampler[int]):
    """A sampler whose order depends on the run's seed and the epoch alone, and whose next iterator leaves out its first
    samples. `begin_epoch`: seeds everything for an epoch, and returns the seed."""

    def __init__(self, sampler: Any, begin_epoch: Callable[[int], int], skipped: int) -> None:
        self.sampler, self._begin_epoch, self._skipped = sampler, begin_epoch, skipped
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        # torch's samplers draw once they are asked for the first sample: until then others draw from the same generator.
        seed = self._begin_epoch(self._epoch)
        wrapped: Any = self.sampler.dataset if isinstance(self.sampler, DistributedSamplerWrapper) else None
        drawing = wrapped._sampler if wrapped is not None else self.sampler
        if isinstance(generator := getattr(drawing, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self.sampler), skipped, None)

    def __len__(self) -> int:
        return len(self.sampler)


def _as_on_several_ranks(sampler: Any) -> Any:
    """In the place of a lone rank's sampler, that which Lightning takes on several ranks: of any number of ranks a step has the
    same samples."""
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    if not shuffled and type(sampler) is not SequentialSampler:
        return sampler
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    return DistributedSampler(sampler.data_source, num_replicas=1, rank=0, shuffle=shuffled, seed=seed)


class _FitPosition:
    """What a Trainer keeps beside its model and optimizer, between two steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step = 0
        self.resumed = False
        self._loops: dict[str, Any] = {}
        self._between_epochs = False
        self._batches: list[int] | None = None  # samples of a batch over all ranks, and batches of a step
        self._orders: list[str] | None = None  # what orders the samples of an epoch, and the batches of one

    @property
    def epoch(self) -> int:
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    @property
    def within_epoch(self) -> bool:
        return self.resumed and not self._between_epochs

    def state_dict(self) -> dict[str, object]:
        """Loops are as `take_loops` found them, all else is as it is now."""
        trainer = self._trainer
        return {
            "step": self.step,
            "loops": self._loops,
            "between_epochs": self._between_epochs,
            "batches": self._batches,
            "orders": self._orders,
            "stopped_early": trainer.should_stop,
            "precision": trainer.precision_plugin.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": _without_tensors({one.state_key: state for one in trainer.callbacks if (state := one.state_dict())}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Leaves the data to `place_loaders`. A callback that has no saved state stays as it is."""
        trainer, self.resumed = self._trainer, True
        self.step, self._loops, self._batches = saved["step"], saved["loops"], saved["batches"]
        self._between_epochs, self._orders = saved["between_epochs"], saved["orders"]
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

    def place_loaders(self, begin_epoch: Callable[[int], int], *, within_epoch: bool) -> None:
        """Begin the epoch's data, or go on where it is: Lightning goes on with its counters, but begins the data anew.
        `begin_epoch`: as for `_EpochOrder`. Raises: ConfigError if a loader has no position, or steps other samples than in the
        run so far."""
        trainer = self._trainer
        loaders = trainer.fit_loop._combined_loader
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready if within_epoch else 0
        batches, orders = [], []
        for loader in loaders.flattened:
            batch_sampler = _batch_sampler(loader)
            order = batch_sampler.sampler
            if not isinstance(order, _EpochOrder):
                sampler = _as_on_several_ranks(order) if trainer.world_size == 1 else order
                # The shorter loaders of several begin again meanwhile.
                skipped = done if loaders._mode == "max_size" else done % max(1, len(batch_sampler))
                order = batch_sampler.sampler = _EpochOrder(sampler, begin_epoch, skipped * batch_sampler.batch_size)
            order.set_epoch(self.epoch)
            batches.append(batch_sampler.batch_size * trainer.world_size)
            orders.append(f"{type(order.sampler).__name__} with {len(batch_sampler)} batches")
        batches.append(trainer.accumulate_grad_batches)
        if self._batches not in (None, batches):
            message = "batch_size x ranks, and accumulate_grad_batches, must be {} as in the run so far, but are {}"
            raise ConfigError([Problem("train_dataloader", message.format(self._batches, batches))])
        if within_epoch and orders != self._orders:
            message = f"must be ordered by {self._orders} until this epoch is over, as in the run so far, but are by {orders}"
            raise ConfigError([Problem("train_dataloader", message)])
        self._batches, self._orders = batches, orders


def _batch_sampler(loader: object) -> Any:
    """Raises: ConfigError if the sampler of `loader` does not decide its samples."""
    sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
    # torch gives an iterable dataset a sampler that means nothing.
    if not isinstance(sampler, BatchSampler) or isinstance(loader.dataset, IterableDataset):  # type: ignore[attr-defined]
        message = "must be a DataLoader with a sampler over a dataset with a length: the sampler is the run's position"
        raise ConfigError([Problem("train_dataloader", message)])
    if type(sampler).__iter__ is not BatchSampler.__iter__:
        message = f"must have torch's BatchSampler, which takes samples in turn, but has {type(sampler).__name__}"
        raise ConfigError([Problem("train_dataloader", message)])
    return sampler


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
