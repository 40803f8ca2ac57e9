"""What a launcher knows of where it is, and what has to be asked of the host to know it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["slurm", "kubernetes", "runai", "vast", "plain"]
Role = Literal["launcher", "idle"]


class Interface(Protocol):
    """A network interface of this host."""

    @property
    def name(self) -> str: ...

    @property
    def addresses(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Probes:
    """Facts about this host that no environment tells; what is left out counts as unknown."""

    names: tuple[str, ...] = ()
    """The host's own names and addresses, to find it in a list of hosts."""

    interfaces: Sequence[Interface] = ()

    default_interface: str = ""
    """The interface of the default route, by which the kernel sends to an address of the public network."""


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """What the environment says of this host and its job."""

    kind: Kind

    role: Role = "launcher"
    """Of several tasks that the cluster started on this host one is the launcher. The others are idle: they wait for it to end,
    and end with it."""

    order: int = -1
    """This host's number among the cluster's hosts; -1 where it does not number them."""

    num_hosts: int = 0
    """Hosts that the cluster promised; 0 if unknown."""

    processes: int = 0
    """Workers of this host; 0 for as many as it has GPUs."""

    address: str = ""
    """The address at which the other hosts reach this one; empty: the one from which the kernel sends to them."""

    peers: tuple[str, ...] = ()
    """Names or addresses of other hosts, as far as they are known."""

    deadline: float | None = None
    """Unix time at which the cluster ends the job, if it says so."""

    job: str = ""
    """The cluster's name for the job; empty if unknown."""

    conclusions: tuple[str, ...] = ()
    """What was concluded from which variable, for people."""

    warnings: tuple[str, ...] = ()
    """What is probably not meant, and what to do about it."""
