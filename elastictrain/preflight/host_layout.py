"""Where a rank stands among the hosts of its group. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """`hosts` are in the order of their first ranks; names that several have are told apart by their node rank."""

    hosts: tuple[str, ...]
    node_rank: int
    local_rank: int
    local_world_size: int
    hosts_of_ranks: tuple[str, ...] = ()
    """The same names, for each rank of the group."""

    rendezvous: str | None = None
    """Address or name of where the group meets; None in a world of one."""

    @property
    def host(self) -> str:
        """What this host is called in verdicts."""
        return self.hosts[self.node_rank]

    @property
    def leads_host(self) -> bool:
        """Whether this rank checks on behalf of its host."""
        return self.local_rank == 0

    @property
    def leads_group(self) -> bool:
        """Whether this rank brings the words of all hosts together."""
        return self.leads_host and self.node_rank == 0


def find_layout(ranks: Sequence[tuple[str, int]], *, rank: int, local_rank: int, rendezvous: str | None) -> HostLayout:
    """`ranks`: host and local world size of each rank, those of a host one after another, as torchrun numbers them."""
    firsts: list[int] = []
    begin = 0
    while begin < len(ranks):
        firsts.append(begin)
        begin += max(1, ranks[begin][1])
    names = [ranks[first][0] for first in firsts]
    labels = [name if names.count(name) == 1 else f"{name} (node rank {node})" for node, name in enumerate(names)]
    return HostLayout(
        hosts=tuple(labels),
        node_rank=_node(firsts, rank),
        local_rank=local_rank,
        local_world_size=ranks[rank][1],
        hosts_of_ranks=tuple(labels[_node(firsts, other)] for other in range(len(ranks))),
        rendezvous=rendezvous,
    )


def _node(firsts: Sequence[int], rank: int) -> int:
    return max(node for node, first in enumerate(firsts) if first <= rank)
