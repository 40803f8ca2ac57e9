"""What a host knows when it decides. Frozen; all times are on its own monotonic clock, and none is compared with another's."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from elastictrain.launch.membership.observation import HostObservation
from elastictrain.launch.membership.records import End, Generation, HostRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """One look around."""

    now_s: float
    began_s: float
    """When this launcher had read storage for the first time: a generation that was over by then is none of its own."""

    me: HostRecord
    """What this host says of itself at present."""

    running: Generation | None
    """What runs here, or is being stopped here; None if nothing does."""

    newest: Generation | None
    newest_since_s: float
    """When it was first seen here."""

    ends: Mapping[str, End]
    """Those of `newest`, by host; read before `observed` was."""

    ended_since_s: float | None
    """When the first of them was seen here."""

    observed: Mapping[str, HostObservation]
    """The other hosts' lines, by host."""

    read_s: float
    """When `observed` was read last, in a turn in which this host's own line and its posts could be written as well. Nobody has
    become silent while storage could not be reached: silence is counted up to here."""

    silent: frozenset[str]
    """Members of the generation in which this host takes part, or last did, that its watch has not heard for long."""

    heard: frozenset[str]
    """Hosts that its watch hears now, members or not."""

    heard_since_s: float
    """Since when those are the same."""

    expected_hosts: int = 0
    """What the cluster promised; 0 if unknown."""

    restart_cost_s: float = 0.0
    """As measured, from an end to the next step; 0 if unknown."""

    most_processes: int = 0
    """Workers above which there is nothing more to do: samples of a global batch. 0 if unknown."""

    left_s: float = inf
    """Until the run's time limit."""

    stop_limit_s: float = 920.0
    """How long an orderly end may take on a host: a save, and the shutdown."""

    wants_to_leave: bool = False
    """Whether this host was asked to leave."""
