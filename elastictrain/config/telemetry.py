"""The group `telemetry`: what a person sees."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import Range


@dataclass(frozen=True, slots=True)
class TelemetryGroup:
    """What a person sees while the run goes on. Events are always written, for every step."""

    log_every_steps: Annotated[int, Range(1)] = 10
    """Optimizer steps between lines on the terminal and points in TensorBoard."""

    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """`auto` shows a bar on a terminal and single lines elsewhere."""

    tensorboard: bool = True
    """Write <run.dir>/tensorboard/."""

    peak_tflops: Annotated[float, Range(0.0, exclusive=True)] | None = None
    """Dense peak of one device in the precision used (10^12 operations/s), for MFU; null looks the device up in a table."""

    flush_s: Annotated[float, Range(0.0, exclusive=True)] = 10.0
    """Longest time for which events may be missing from a remote run.dir."""
