"""How a worker introduces itself to its keeper. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.messages import MalformedError, Message, count, text
from elastictrain.checkpoint.lineage import number_of


@dataclass(frozen=True, slots=True)
class Hello:
    """One worker, and the group that it belongs to."""

    rank: int
    station: Station
    agent: int
    """The process that would start the worker again."""

    address: str
    """Where other hosts reach this one; empty where there are none."""

    port: int
    """To be taken over from a keeper that is gone; 0 for any."""


def is_past(incarnation: str, *, present: str, left: Collection[str], connected: bool) -> bool:
    """Whether a worker of `incarnation` comes too late, where `present` is the one at work.

    Two lives have the same number if the first ended before a trace of it was stored. Then the one that came later is the
    younger, unless it was `left` before, or workers of the present one are still `connected`.
    """
    its, ours = number_of(incarnation), number_of(present)
    return incarnation != present and (incarnation in left or its < ours or (its == ours and connected))


def read_hello(message: Message) -> Hello:
    """Raises: MalformedError."""
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, int) and rank >= 0 for rank in ranks) or not ranks:
        raise MalformedError(f"`ranks` must be a list of ranks, but is {ranks!r}")
    station = Station(
        text(message, "incarnation"),
        count(message, "world_size"),
        tuple(sorted(rank for rank in ranks if isinstance(rank, int))),
    )
    rank = count(message, "rank")
    if rank not in station.ranks or max(station.ranks) >= station.world_size:
        raise MalformedError(f"rank {rank} of {station.world_size} is not among {station.ranks}")
    return Hello(rank, station, count(message, "agent"), text(message, "address"), count(message, "port"))
