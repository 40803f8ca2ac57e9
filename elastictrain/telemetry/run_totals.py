"""Figures of a run over all its starts, for loggers: a small record in the run folder, so that no events are read."""

from contextlib import suppress
from dataclasses import dataclass, replace

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.errors import ObjectNotFoundError
from elastictrain.storage.bounded_read import read_record
from elastictrain.telemetry.loggers import LoggedRun, MetricPoint

_KEY = "telemetry/totals.json"


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Sums until `time`. Worker-seconds are those of the largest world so far, as in the report."""

    time: float = 0.0  # Unix seconds
    worker_s: float = 0.0
    new_steps: int = 0  # done for the first time
    measured_steps: int = 0  # of them, those that made `measured_s`
    measured_s: float = 0.0  # of workers
    largest_world: int = 0
    step: int = 0  # the newest that was done
    reached: int = 0  # the newest that the last start has done
    starts: int = 0
    lost_steps: int = 0

    def begin(self, *, time: float, world_size: int, first_step: int, newest_step: int) -> "RunTotals":
        """Another generation has begun, and continues with `first_step`. `newest_step`: what the one before it has done, as far
        as known."""
        newest = max(self.step, newest_step) if self.starts else first_step - 1
        reached = max(self.reached, newest_step) if self.starts else 0
        return replace(
            self._until(time) if self.starts else replace(self, time=time),
            # Some were done after the last record.
            new_steps=self.new_steps + (newest - self.step if self.starts else 0),
            largest_world=max(self.largest_world, world_size),
            step=max(newest, first_step - 1),
            reached=first_step - 1,
            starts=self.starts + 1,
            lost_steps=self.lost_steps + max(0, reached - first_step + 1),
        )

    def add(self, *, time: float, step: int, step_s: float, world_size: int) -> "RunTotals":
        """Steps until `step` are done, and took `step_s` each; 0 where that is not known."""
        new = max(0, step - self.step)
        return replace(
            self._until(time),
            new_steps=self.new_steps + new,
            measured_steps=self.measured_steps + (new if step_s else 0),
            measured_s=self.measured_s + new * step_s * world_size,
            step=self.step + new,
            reached=max(self.reached, step),
        )

    def scalars(self) -> dict[str, float]:
        found = {}
        if self.worker_s and self.measured_steps:
            # Steps that were not measured took as long as the others.
            found["run/goodput"] = min(1.0, self.measured_s / self.measured_steps * self.new_steps / self.worker_s)
        return {**found, "run/restarts": float(self.starts - 1), "run/lost_steps": float(self.lost_steps)}

    def _until(self, time: float) -> "RunTotals":
        passed_s = max(0.0, time - self.time)
        return replace(self, time=self.time + passed_s, worker_s=self.worker_s + passed_s * self.largest_world)


class RunTotalsLogger:
    """Keeps the totals, in a thread like any logger. `scalars` is empty until they are read."""

    def __init__(self, *, began: float, newest_step: int) -> None:
        """`began`: this generation, in Unix seconds. `newest_step`: see `RunTotals.begin`."""
        self._began, self._newest_step = began, newest_step
        self._totals = RunTotals()
        self.scalars: dict[str, float] = {}

    def open(self, run: LoggedRun) -> None:
        """Reads the record, counts this start and writes it at once. Raises: StorageError."""
        self._run, self._before = run, (self._began, run.first_step)
        before = RunTotals()
        # A damaged record begins anew.
        with suppress(ObjectNotFoundError, MalformedJsonError):
            before = parse_record(read_record(run.store, _KEY), RunTotals)
        self._totals = before.begin(
            time=self._began, world_size=run.world_size, first_step=run.first_step, newest_step=self._newest_step
        )
        self.scalars = self._totals.scalars()
        self._write()

    def log(self, point: MetricPoint) -> None:
        """Adds the steps since the point before; writes the record at most once in `flush_s` seconds. Raises: StorageError."""
        (time, step), run = self._before, self._run
        # The first step warms up. A loop of the user's does not measure its steps.
        known = point.values.get("speed/step_s", (point.time - time) / max(1, point.step - step))
        step_s = known if point.step > run.first_step else 0.0
        self._totals = self._totals.add(time=point.time, step=point.step, step_s=step_s, world_size=run.world_size)
        self._before, self.scalars = (point.time, point.step), self._totals.scalars()
        if point.time - self._written >= self._run.flush_s:
            self._write()

    def close(self, *, complete: bool) -> None:
        self._write()

    def _write(self) -> None:
        self._run.store.write(_KEY, encode_record(self._totals))
        self._written = self._totals.time
