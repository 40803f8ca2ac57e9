"""What the adapters share: a run whose loop belongs to a framework."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from elastictrain.data.samples import derive_seed
from elastictrain.errors import ConfigError, Problem, UsageError
from elastictrain.own_loop.per_rank import HasStateDict
from elastictrain.own_loop.run import Run, attach
from elastictrain.own_loop.session import Session, init_process_group, present_session
from elastictrain.train.parameters import seed_everything


class FrameworkLoop:
    """Ties a framework's loop to a run. A step is done once all is over that follows its update, as an evaluation that a
    scheduler or early stopping depends on: when the next step begins, or training ends."""

    def __init__(
        self, callback: object, url: str, extra: Mapping[str, object] | None, options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._callback, self._url, self._extra, self._options = type(callback).__name__, url, dict(extra or {}), options
        self._run: Run | None = None
        self._updated: int | None = None  # the step whose update is made, and which is not done yet
        self._metrics: dict[str, float | Tensor] = {}

    def open(self) -> None:
        """Before the framework makes its process group: it then takes this one. Collective: yes."""
        init_process_group(self._url, recoverable=False, **self._options)

    def restore(self, model: nn.Module, optimizer: Optimizer, position: HasStateDict, *, world_size: int) -> int:
        """Load the newest step into these, once the framework has wrapped them. `position`: where its loop is, and all else
        that it keeps; `world_size`: of the framework. Returns the step, or 0. Collective: yes. Raises: ConfigError; as
        `attach` and `Run.restore`."""
        ranks = self._session().context.identity.world_size
        if world_size != ranks:
            message = f"must train with {ranks} ranks, one for each process of torchrun, but does with {world_size}"
            raise ConfigError([Problem("Trainer", message)])
        if self._run is not None:
            raise UsageError("a run is of one training: begin another one, with another folder, in another process")
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            message = "must not be sharded by FSDP version 1, whose parts have no common names: use FSDP2 (fully_shard)"
            raise ConfigError([Problem("model", message)])
        self._run = attach(self._url, model=model, optimizer=optimizer, extra={**self._extra, "framework": position})
        return self._run.restore()

    def begin_epoch(self, epoch: int) -> int:
        """Before the iterator of an epoch is made: what it draws is the same when the epoch is gone on with. Returns the seed
        of the epoch."""
        seed_everything(seed := derive_seed(self._session().context.config.run.seed, "epoch", epoch))
        return seed

    def begin_step(self) -> None:
        """Before the first forward pass of a step: the one before is done. Collective: yes."""
        self.finish_step()
        self._session().seed()

    def updated(self, step: int, metrics: Mapping[str, float | Tensor] | None = None) -> None:
        """The update of `step` is made."""
        self._updated, self._metrics = step, dict(metrics or {})

    def add_metrics(self, metrics: Mapping[str, object]) -> None:
        """Numbers of the step that is not done yet."""
        self._metrics |= {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    def finish_step(self) -> None:
        """The step whose update was made is done. Collective: yes. Raises: SystemExit once the ranks have agreed to stop, and
        that step is saved: nothing that a framework does at its end could be afforded then."""
        run, step, self._updated = self._run, self._updated, None
        if run is None or step is None:
            return
        run.step_done(step, self._metrics)
        if run.should_stop:
            raise SystemExit(run.close())

    def end_training(self) -> None:
        """Save the last step, if this process has made one: frameworks move or replace the model from here on. Collective:
        yes. Raises: as `finish_step`."""
        done = self._updated is not None
        self.finish_step()
        if done and self._run is not None:
            self._run.save()

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the run. Raises: SystemExit as `Run.__exit__`."""
        session = present_session()
        if self._run is None and session is not None and not session.attached:
            # Nothing was trained. The session ends as that of any run.
            self._run = attach(self._url, model=nn.Identity(), optimizer=None)
        if self._run is not None:
            self._run.__exit__(kind, error, trace)

    def _session(self) -> Session:
        session = present_session()
        if session is None:
            raise UsageError(f"the callback must be entered before it is used: `with {self._callback}(...) as elastic:`")
        return session


class EntersRun:
    """A callback in whose `with` block the run goes on."""

    _loop: FrameworkLoop

    def __enter__(self) -> Self:
        self._loop.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.close(kind, error, trace)
