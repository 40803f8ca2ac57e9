"""Loggers of metrics: what a logger is, how `telemetry.loggers` chooses some, and the thread in which each one works."""

import importlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol, cast
from uuid import uuid4

from elastictrain.config.constraints import show
from elastictrain.config.validate import check_dataclass, suggest_choice
from elastictrain.errors import ConfigError, ObjectExistsError, PermanentStorageError, Problem
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.failures import reason_of
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

KEPT_POINTS = 10_000  # while a logger fails; older ones are lost
_LONGEST_PAUSE_S = 60.0
_ID_KEY = "telemetry/run_id"

# name -> class, the package that it imports, and how that is installed
_NAMES = {
    "tensorboard": ("elastictrain.telemetry.tensorboard.TensorBoardLogger", "tensorboard", "tensorboard"),
    "wandb": ("elastictrain.telemetry.wandb.WandbLogger", "wandb", "wandb"),
    "mlflow": ("elastictrain.telemetry.mlflow.MlflowLogger", "mlflow", "mlflow"),
    "prometheus": ("elastictrain.telemetry.prometheus.PrometheusLogger", "", ""),
}


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run, and the generation of it in which a logger writes."""

    store: Store  # rooted at run.dir
    config: Mapping[str, object]  # the resolved configuration, in groups
    world_size: int
    generation: str
    first_step: int  # the first step of this generation; a generation before may have logged it and later ones
    total_steps: int  # 0 where nobody knows: a loop of the user's
    flush_s: float  # how long points may wait in this process
    close_s: float  # how long `close` may take

    @property
    def name(self) -> str:
        """The last part of run.dir."""
        return re.split(r"[/:]", self.store.url.rstrip("/"))[-1]

    def read_id(self) -> str:
        """Twelve hex digits, the same in every generation: they are kept in the run folder. Raises: StorageError."""
        with suppress(ObjectExistsError):
            self.store.create(_ID_KEY, uuid4().hex[:12].encode())
        text = read_bounded(self.store, _ID_KEY, max_bytes=32).decode(errors="replace")
        if not re.fullmatch("[0-9a-f]{12}", text):
            raise PermanentStorageError(f"{self.store.url}/{_ID_KEY} must be 12 hex digits, but is not; delete it")
        return text


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Metrics of a step, by tag (`loss/train`)."""

    step: int
    time: float  # unix seconds
    values: Mapping[str, float]


class MetricLogger(Protocol):
    """Writes metrics somewhere. The constructor takes the options and does nothing else. One thread of rank 0 makes all other
    calls; training does not wait for them. A call that raises is repeated later."""

    def open(self, run: LoggedRun) -> None:
        """Called first in each generation: begin the run, or continue it."""

    def log(self, point: MetricPoint) -> None:
        """Write a point. Steps rise, but a generation repeats steps of the one before."""

    def close(self, *, complete: bool) -> None:
        """Write what waits. `complete`: the last step of the run was logged, or nobody knows which is the last; else the
        run is to be continued."""


def make_loggers(chosen: Sequence[str | Mapping[str, object]]) -> list[tuple[str, MetricLogger]]:
    """The loggers that `telemetry.loggers` chooses, each with its name; none has begun. Raises: ConfigError with every
    problem."""
    made: list[tuple[str, MetricLogger]] = []
    problems: list[Problem] = []
    for index, one in enumerate(chosen):
        key = f"telemetry.loggers[{index}]"
        options: dict[str, object] = {"_target_": one} if isinstance(one, str) else dict(one)
        target = options.pop("_target_", None)
        if not isinstance(target, str):
            problems.append(Problem(key, f"must be a name, or a group of keys with `_target_`, but is {show(one)}"))
            continue
        cls = _find_class(target, key)
        if isinstance(cls, Problem):
            problems.append(cls)
            continue
        found, wrong = check_dataclass(cls, values=options, path=key)
        problems += wrong
        if found is not None:
            made.append((target, cast(MetricLogger, found)))
    if problems:
        raise ConfigError(problems)
    return made


def _find_class(target: str, key: str) -> type[object] | Problem:
    if target == "jsonl":
        return Problem(key, "must not be jsonl: each run writes its events as JSONL to run.dir/events anyway; leave it out")
    path, package, install = _NAMES.get(target, (target, "", ""))
    # A folder of this name in the current directory, such as wandb/, counts as a package without a file.
    if package and ((spec := find_spec(package)) is None or spec.origin is None):
        return Problem(key, f"is {target}, which needs the package {package}, but it is not installed: pip install {install}")
    module_name, _, name = path.rpartition(".")
    if not module_name:
        names = (*_NAMES, "package.module.Class")
        return Problem(key, f"must be one of {', '.join(names)}, but is {show(target)}{suggest_choice(target, choices=names)}")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # noqa: BLE001  a module of the user's own may raise anything when imported
        return Problem(key, f"names {target}, which cannot be imported: {type(error).__name__}: {error}")
    lacking = [method for method in ("open", "log", "close") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacking:
        return Problem(key, f"must name a class with the methods open, log and close, but {target} lacks {', '.join(lacking)}")
    return found


@dataclass(slots=True)
class LoggerThread:
    """Calls one logger in a thread of its own. Points wait here while the logger is slow or fails."""

    name: str
    target: MetricLogger
    run: LoggedRun
    clock: Callable[[], float] = time.time
    first_pause_s: float = 1.0  # before a failed call is repeated; doubled each time
    _points: deque[MetricPoint] = field(default_factory=deque, init=False)
    _lost: int = field(default=0, init=False)
    _opened: bool = field(default=False, init=False)
    _closing: bool = field(default=False, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"logger-{self.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._changed:
            if len(self._points) >= KEPT_POINTS:
                self._points.popleft()
                self._lost += 1
            self._points.append(MetricPoint(step, self.clock(), dict(values)))
            self._changed.notify_all()

    def begin_close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, limit_s: float) -> None:
        """Wait until all points are written, and tell how many are not."""
        self.begin_close()
        self._thread.join(limit_s)
        with self._changed:
            lost = self._lost + len(self._points)
        if lost:
            logger.warning("%s lacks %d points of this generation", self.name, lost)
        elif self._thread.is_alive():
            logger.warning("%s has not ended within %.0f s; some points may be lost", self.name, limit_s)

    def _work(self) -> None:
        last_step, pause_s = self.run.first_step - 1, self.first_pause_s
        warned = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._opened or self._points or self._closing)
                point, closing = self._points[0] if self._points else None, self._closing
            try:
                if not self._opened:
                    self.target.open(self.run)
                    self._opened = True
                elif point is not None:
                    self.target.log(point)
                    last_step = point.step
                    with self._changed:
                        # It may have been dropped meanwhile.
                        if self._points and self._points[0] is point:
                            self._points.popleft()
                else:
                    self.target.close(complete=last_step >= self.run.total_steps)
                    return
                pause_s = self.first_pause_s
            except Exception as error:  # noqa: BLE001  the edge of the thread: no logger ends or stops a run
                if not warned:
                    logger.warning("%s fails: %s; its points are kept and written later", self.name, reason_of(error))
                warned = True
                if closing:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def close_loggers(threads: Sequence[LoggerThread], *, limit_s: float) -> None:
    """Close all of them at the same time."""
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.begin_close()
    for thread in threads:
        thread.close(max(0.0, until_s - time.monotonic()))
