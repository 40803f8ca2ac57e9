"""Prometheus, through the textfile collector of its node exporter."""

import os
import re
from pathlib import Path

from elastictrain.config.constraints import show
from elastictrain.telemetry.loggers import LoggedRun, MetricPoint


class PrometheusLogger:
    """Writes the newest metrics to a file on rank 0's host. `path`: a file whose name ends with .prom.

    Source: the text format, https://prometheus.io/docs/instrumenting/exposition_formats/."""

    def __init__(self, *, path: str) -> None:
        if not path.endswith(".prom"):
            raise ValueError(f"path must end with .prom, but is {path}")
        self._path = Path(path).expanduser()

    def open(self, run: LoggedRun) -> None:
        self._label = f"{{run={show(run.name)}}}"
        self._values: dict[str, float] = {}

    def log(self, point: MetricPoint) -> None:
        """Replaces the file, with the newest value of each metric since `open`. Raises: OSError."""
        self._values |= {"step": float(point.step), **point.values}
        lines = []
        for tag, value in self._values.items():
            name = "elastictrain_" + re.sub(r"\W", "_", tag, flags=re.ASCII)
            lines.append(f"# TYPE {name} gauge\n{name}{self._label} {value}\n")
        # The collector takes names that end with .prom, so it never reads half a file.
        unfinished = self._path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text("".join(lines))
        unfinished.replace(self._path)

    def close(self, *, complete: bool) -> None:
        """The last values stay; the file's age tells that nobody writes."""
