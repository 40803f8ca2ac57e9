"""A limit on torchrun's own rendezvous. Its client of the store has none where a host takes a connection and then says nothing.

It runs in torchrun's process, in a thread: torchrun's own is in a call that does not return.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastictrain.distributed.bounded import within
from elastictrain.launch.membership.messages import listed
from elastictrain.torch_private import find_agents

_ANSWER_S = 3.0
"""How long the store has to say who came, once the limit is over."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where torchruns meet, and which of them this one is."""

    address: str
    port: int
    run_id: str
    index: int
    """This host's place in the generation."""


def bound_rendezvous(
    place: StorePlace,
    hosts: Sequence[str],
    *,
    limit_s: float,
    begun: Callable[[], bool],
    not_met: Callable[[tuple[int, ...], str], None],
) -> None:
    """Unless workers have begun after `limit_s`, have `not_met` called with the hosts to blame, by place, and a sentence."""

    def look() -> None:
        if begun():
            return
        came = within(_ANSWER_S, lambda: find_agents(place.address, place.port, run_id=place.run_id, count=len(hosts)))
        if not begun():
            missing = find_missing(came, index=place.index, count=len(hosts))
            not_met(missing, why_not_met(missing, hosts, place, after_s=limit_s))

    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), look)
    timer.daemon = True
    timer.start()


def find_missing(came: Collection[int] | None, *, index: int, count: int) -> tuple[int, ...]:
    """Places of the other hosts that have not come; the first where its store does not say who came. Empty if unknown."""
    first = () if index == 0 else (0,)
    if came is None:
        return first
    # The first host itself comes to its store only once all others have.
    return tuple(place for place in range(1, count) if place not in came and place != index) or first


def why_not_met(missing: Sequence[int], hosts: Sequence[str], place: StorePlace, *, after_s: float) -> str:
    """A sentence that names the hosts to blame."""
    store = f"the store on {hosts[0]} at {place.address}:{place.port}"
    likely = "frozen, cut off or gone, or a firewall drops what is sent"
    if not missing:
        return f"not all hosts have come to {store} within {after_s:g} s (`fault.rendezvous_timeout_s`)"
    if missing[0] == 0:
        return f"{store} has not answered for {after_s:g} s (`fault.rendezvous_timeout_s`): {hosts[0]} is {likely} to it"
    names = listed(hosts[one] for one in missing)
    one = len(missing) == 1
    return (
        f"{names} {'has' if one else 'have'} not come to {store} within {after_s:g} s (`fault.rendezvous_timeout_s`): "
        f"{'it is' if one else 'they are'} {likely} to {hosts[0]}"
    )
