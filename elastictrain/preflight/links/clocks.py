"""Whose clock is off, from what pairs of hosts found of each other's clocks."""

import statistics
from collections import deque
from collections.abc import Mapping

from elastictrain.preflight.links.messages import Link


def offsets_from_group(offsets: Mapping[Link, float], *, num_hosts: int) -> dict[int, float]:
    """How far each host's clock is ahead of the group's, in seconds; hosts that nobody has asked are left out.

    `offsets`: by link, the second host's clock minus the first's. Along a chain of links they add up, so that not all ask the
    first host. Three hosts or more have their median as the time of the group, else the first host has it.
    """
    neighbours: dict[int, dict[int, float]] = {}
    for (source, target), offset in sorted(offsets.items()):
        neighbours.setdefault(source, {}).setdefault(target, offset)
        neighbours.setdefault(target, {}).setdefault(source, -offset)
    ahead = _from_first(neighbours)
    if len(ahead) < 2:
        return {}
    middle = statistics.median_low(ahead.values()) if len(ahead) > 2 else 0.0
    return {host: ahead[host] - middle for host in range(num_hosts) if host in ahead}


def exchange_offset(asked: float, received: float, answered: float, heard: float) -> float:
    """The other's clock minus ours. The second and third time are the other's. Source: RFC 5905, section 8."""
    return ((received - asked) + (answered - heard)) / 2


def _from_first(neighbours: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    if not neighbours:
        return {}
    start = min(neighbours)
    ahead, queue = {start: 0.0}, deque([start])
    while queue:
        host = queue.popleft()
        for other, offset in neighbours[host].items():
            if other not in ahead:
                ahead[other] = ahead[host] + offset
                queue.append(other)
    return ahead
