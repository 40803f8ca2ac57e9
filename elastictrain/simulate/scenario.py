"""A fleet and the settings of its run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastictrain.config.composed import LaunchGroup
from elastictrain.simulate.costs import RunCosts


@dataclass(frozen=True, slots=True)
class Scenario:
    """`every_s`: between checkpoints. `replicas`: hosts that keep a copy of each host's snapshots. `notice_s`: from a notice
    until the host is gone. `breaks`: the share of outages in which connections break before launchers notice. `prices`: from
    when on a host costs how much an hour."""

    hosts: int = 64
    days: float = 30.0
    launch: LaunchGroup = field(default_factory=lambda: LaunchGroup(wait_s=0.0))
    costs: RunCosts = field(default_factory=RunCosts)
    every_s: float = 600.0
    replicas: int = 1
    standbys: int = 1
    processes: int = 8
    keep_last: int = 3
    notice_s: float = 30.0
    breaks: float = 0.5
    prices: Sequence[tuple[float, float]] = ((0.0, 0.0),)
    seed: int = 1

    @property
    def full_hosts(self) -> int:
        """Hosts that do a step in `costs.step_s`."""
        return self.launch.max_hosts or self.hosts
