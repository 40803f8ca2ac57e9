"""The group `launch`: how many hosts a run takes, how long it waits for them, and when it gives up."""

from dataclasses import dataclass
from typing import Annotated

from elastictrain.config.constraints import NonEmpty, Range


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """How `python -m elastictrain.launch` forms groups of hosts and restarts them. Without effect on a plain torchrun."""

    min_hosts: Annotated[int, Range(1)] = 1
    """Hosts below which the run waits instead of training."""

    max_hosts: Annotated[int, Range(0)] = 0
    """Hosts above which others wait as spares; 0 for as many as come."""

    processes: Annotated[int, Range(0)] = 0
    """Workers of each host; 0 for one for each GPU that is visible, or a single one without GPUs."""

    hosts: tuple[Annotated[str, NonEmpty()], ...] = ()
    """Names or addresses of the hosts, in the order of their ranks, where no cluster lists them; the first group waits
    for `min_hosts` of them, and for the rest for `join_s`. Without a list hosts are taken as they come."""

    address: str = ""
    """IP address at which the other hosts reach this one; empty for the one that the cluster names or the kernel uses."""

    join_s: Annotated[float, Range(0.0)] = 30.0
    """How long the first group waits for more hosts than `min_hosts`, unless all that the cluster promised are there."""

    wait_s: Annotated[float, Range(0.0)] = 3600.0
    """How long to wait for `min_hosts` before giving up; 0 for ever."""

    lost_s: Annotated[float, Range(0.5)] = 4.0
    """How long a host may be silent before the others go on without it."""

    poll_s: Annotated[float, Range(0.1)] = 1.0
    """Interval at which the roster is read; a host that waits shows a sign of life there as often."""

    grow: bool = True
    """Take in hosts that come while the group trains."""

    grow_after_s: Annotated[float, Range(0.0)] = 30.0
    """How long a host that comes late must have been there before training is interrupted for it."""

    grow_every_s: Annotated[float, Range(0.0)] = 300.0
    """Shortest time between a start and an interruption to take in more hosts."""

    max_failures: Annotated[int, Range(1)] = 3
    """Failures without progress in between, a newer step in storage or in host memory, after which the run gives up."""

    backoff_s: Annotated[float, Range(0.0)] = 1.0
    """Pause before the second start without progress; doubled each time, up to `backoff_limit_s`."""

    backoff_limit_s: Annotated[float, Range(0.0)] = 60.0
    """Longest pause between two starts."""

    retry_unfit_s: Annotated[float, Range(0.0)] = 600.0
    """When a host that was found unfit is checked again; 0 to leave at once with exit code 69."""

    max_hours: Annotated[float, Range(0.0)] = 0.0
    """Wall-clock limit after which the run is stopped and saved; 0 for none. A limit of Slurm is found by itself."""

    notices: bool = True
    """Ask the cloud's metadata service whether this host is about to be taken away."""
