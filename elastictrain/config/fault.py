"""The group `fault`: how long anything may take before it counts as hung, and how often replicas are compared."""

from dataclasses import dataclass
from typing import Annotated

from elastictrain.config.constraints import Range


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """How long anything may take before it counts as hung. The values form a ladder, checked when the config is composed."""

    rendezvous_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 900.0
    """Until all ranks have agreed on a new incarnation; a host that still fetches its data keeps the others waiting."""

    init_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 600.0
    """For any collective, and for any phase, until the first step is through: start-up, restore, compilation."""

    step_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 120.0
    """For any collective, and for any one part of a step (data, a forward or a backward pass, the update), from then on."""

    save_timeout_s: Annotated[float, Range(0.0, exclusive=True)] = 900.0
    """For one checkpoint to be durable."""

    shutdown_grace_s: Annotated[float, Range(0.0, exclusive=True)] = 20.0
    """For the end of a run to be orderly; after that the process ends itself."""

    notice_s: Annotated[float, Range(0.0, exclusive=True)] = 30.0
    """How long after a signal this host, or its workers, will be ended; where a notice names a time, that counts. 30 s are what
    Kubernetes leaves a pod, torchrun its workers, and Google Cloud and Azure a spot instance. What is not in storage by then
    stays in host memory."""

    heartbeat_s: Annotated[float, Range(0.0, exclusive=True)] = 1.0
    """Interval at which each rank tells the others where it is."""

    hang_multiple: Annotated[float, Range(1.0)] = 10.0
    """A part of a step may last this many times as long as this rank's own steps usually do, once it has done some of them."""

    hang_floor_s: Annotated[float, Range(0.0, exclusive=True)] = 10.0
    """A shorter silence is never taken for a hang, however short the steps are; `fault.step_timeout_s` is the longest."""

    compare_every_steps: Annotated[int, Range(0)] = 0
    """Replicas (DDP, HSDP) compare their parameters and optimizer state this often, besides before every snapshot and
    checkpoint; 0: then only."""

    flight_recorder_entries: Annotated[int, Range(0)] = 2000
    """Collectives that the flight recorder remembers per rank for the dump after a failure; 0 turns it off."""

    @property
    def close_s(self) -> float:
        """For each of the logs and curves of a rank at its end: they are closed one after another, within the grace."""
        return self.shutdown_grace_s / 4
