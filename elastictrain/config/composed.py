"""RunConfig: all groups of one run, validated and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.config.checkpoint import CheckpointGroup
from elastictrain.config.data import DataGroup
from elastictrain.config.fault import FaultGroup
from elastictrain.config.launch import LaunchGroup
from elastictrain.config.optim import OptimGroup
from elastictrain.config.parallel import ParallelGroup
from elastictrain.config.preflight import PreflightGroup
from elastictrain.config.run import RunGroup
from elastictrain.config.task import TaskGroup
from elastictrain.config.telemetry import TelemetryGroup
from elastictrain.config.train import TrainGroup


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that a run is told. `model` belongs to the task and is checked against its constructor."""

    run: RunGroup
    task: TaskGroup
    model: Mapping[str, object]
    data: DataGroup
    train: TrainGroup
    optim: OptimGroup
    parallel: ParallelGroup
    checkpoint: CheckpointGroup
    fault: FaultGroup
    preflight: PreflightGroup
    telemetry: TelemetryGroup
    launch: LaunchGroup
