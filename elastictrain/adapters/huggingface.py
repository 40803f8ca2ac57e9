"""`transformers.Trainer` as a run: snapshots, checkpoints, agreed stops and restarts at the same batch."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Any

from elastictrain.adapters.framework_loop import EntersRun, FrameworkLoop
from elastictrain.errors import ConfigError, Problem, UsageError

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState, TrainerControl
    from transformers.trainer_utils import has_length
except ImportError as missing:
    message = (
        f"elastictrain.adapters.huggingface needs transformers with accelerate ({missing}): pip install transformers accelerate"
    )
    raise ModuleNotFoundError(message) from None

_COUNTERS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class ElasticTrainerCallback(EntersRun, TrainerCallback):
    """Ties a Trainer to the run in the folder `url`. Enter it before `TrainingArguments` are made, which use its process group:

        with ElasticTrainerCallback("runs/mine") as elastic:
            trainer = Trainer(model, TrainingArguments(save_strategy="no", ...), train_dataset=dataset)
            elastic.train(trainer)

    `extra` and `options`: as for `elastictrain.attach`. Left, the run is closed, and its process group is gone; the process
    exits with 75 if it was asked to stop."""

    def __init__(self, url: str, *, extra: Mapping[str, object] | None = None, **options: Mapping[str, Any]) -> None:
        self._loop = FrameworkLoop(self, url, extra, options)
        self._trainer: Any = None
        self._resumed = 0  # the step that this process has begun with

    def train(self, trainer: Trainer) -> Any:
        """In the place of `trainer.train()`, and returns the same. Once per process. Collective: yes. Raises: ConfigError; as
        `elastictrain.attach`; SystemExit with 75 once the ranks have agreed to stop."""
        if not hasattr(trainer, "_run_epoch"):
            raise UsageError("elastictrain.adapters.huggingface needs a newer Trainer: pip install 'transformers>=5.3'")
        self._trainer = trainer
        trainer.add_callback(self)
        run_epoch = trainer._run_epoch
        # A callback cannot place the loop, which has computed where it begins before it calls the first one.
        vars(trainer)["_run_epoch"] = partial(self._run_epoch, run_epoch)
        try:
            return trainer.train()
        finally:
            del vars(trainer)["_run_epoch"]

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Raises: ConfigError; as `elastictrain.attach`."""
        trainer, loader = self._trainer, kwargs["train_dataloader"]
        if not has_length(loader):
            message = "must have a length, which tells where an epoch begins: for others write a loop with elastictrain.attach"
            raise ConfigError([Problem("train_dataset", message)])
        position = _TrainerPosition(trainer, steps_per_epoch=max(1, ceil(len(loader) / args.gradient_accumulation_steps)))
        self._resumed = self._loop.restore(kwargs["model"], kwargs["optimizer"], position, world_size=args.world_size)
        # Logged losses are averages since the last one.
        trainer._initial_global_step = trainer._globalstep_last_logged = self._resumed
        if self._resumed:
            # Another one would count for early stopping.
            args.eval_on_start = False

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._loop.updated(state.global_step)

    def on_log(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._loop.add_metrics({name: one for name, one in kwargs["logs"].items() if name not in ("epoch", "learning_rate")})

    def _run_epoch(
        self, run_epoch: Callable[..., None], *, epoch: int, num_update_steps_per_epoch: int, **arguments: Any
    ) -> None:
        """Goes on within the epoch of the step that was restored; those before it are over."""
        trainer = self._trainer
        control, first_epoch = trainer.control, self._resumed // num_update_steps_per_epoch
        if control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps:
            control.should_training_stop = True
            return
        if epoch < first_epoch:
            return
        within = self._resumed % num_update_steps_per_epoch if epoch == first_epoch else 0
        if within:
            passes = within * trainer.args.gradient_accumulation_steps
            # Where no file with random numbers is: those of a step depend on the step alone.
            arguments |= {
                "resume_from_checkpoint": os.devnull,
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": passes,
            }
        self._loop.begin_epoch(epoch)
        run_epoch(epoch=epoch, num_update_steps_per_epoch=num_update_steps_per_epoch, **arguments)
        if trainer.control.should_training_stop:
            self._loop.end_training()
        else:
            self._loop.finish_step()


class _TrainerPosition:
    """What a Trainer keeps beside its model and optimizer. Its log is not part of it: the run has curves."""

    def __init__(self, trainer: Any, *, steps_per_epoch: int) -> None:
        self._trainer, self._steps_per_epoch = trainer, steps_per_epoch

    def state_dict(self) -> dict[str, object]:
        """Counters, scheduler, scaler and callbacks; and the sizes of a step and an epoch, which `load_state_dict` compares."""
        trainer, state = self._trainer, self._trainer.state
        scaler = trainer.accelerator.scaler
        return {
            "steps_per_epoch": self._steps_per_epoch,
            "samples_per_step": trainer.get_total_train_batch_size(trainer.args),
            "counters": {name: getattr(state, name) for name in _COUNTERS},
            "stopped_early": trainer.control.should_training_stop and state.global_step < state.max_steps,
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "callbacks": {name: callback.state()["attributes"] for name, callback in self._callbacks().items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Raises: ConfigError if a step, or an epoch, has other samples than in the run so far."""
        trainer, samples = self._trainer, self._trainer.get_total_train_batch_size(self._trainer.args)
        if samples != saved["samples_per_step"]:
            factors = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
            message = (
                f"must make {saved['samples_per_step']} samples per step, as in the run so far, but make {samples}: {factors}"
            )
            raise ConfigError([Problem("TrainingArguments", message)])
        if self._steps_per_epoch != saved["steps_per_epoch"]:
            message = (
                f"must make {saved['steps_per_epoch']} steps per epoch, as in the run so far, but makes {self._steps_per_epoch}"
            )
            raise ConfigError([Problem("train_dataset", message)])
        for name, value in saved["counters"].items():
            setattr(trainer.state, name, value)
        trainer.control.should_training_stop = saved["stopped_early"]
        trainer.lr_scheduler.load_state_dict(dict(saved["scheduler"]))
        if trainer.accelerator.scaler is not None and saved["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(saved["scaler"])
        for name, callback in self._callbacks().items():
            for attribute, value in saved["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _callbacks(self) -> dict[str, Any]:
        found = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        return {type(one).__name__: one for one in found if not isinstance(one, TrainerControl)}
