"""Whether training is worth interrupting to take in more hosts. Pure."""

from collections.abc import Sequence

from elastictrain.config.launch import LaunchGroup
from elastictrain.launch.membership import words
from elastictrain.launch.membership.hearing import hearing, unheard_by
from elastictrain.launch.membership.lost import is_alive
from elastictrain.launch.membership.records import Entry, Generation, HostState
from elastictrain.launch.membership.view import View

_TYPICAL_COST_S = 30.0
"""What an interruption costs as long as none was measured."""

_PAYS_WITHIN_S = 1800.0
"""An interruption must have paid for itself after that long: machines that are taken away do not stay for ever."""


def worth_growing(view: View, running: Generation, options: LaunchGroup) -> str | None:
    """Why the first member should end the generation in order to start again with more hosts; None if it should not.

    An interruption costs each worker the time of a restart. The new ones win that back in proportion to how many they are: one
    host more among a hundred has to stay for a hundred times as long as one among one.
    """
    if not options.grow or view.now_s - view.newest_since_s < options.grow_every_s:
        return None
    taken = _fitting(_newcomers(view, running, options), view, running, options)
    if not taken:
        return None
    gained = sum(entry.processes for entry in taken) / max(1, running.world_size)
    cost_s = view.restart_cost_s or _TYPICAL_COST_S
    pays_after_s = cost_s / gained
    if pays_after_s > min(_PAYS_WITHIN_S, view.left_s):
        return None
    names = words.listed(entry.name for entry in taken)
    return f"{names} came: what a restart costs ({cost_s:.0f} s) is won back in {pays_after_s:.0f} s"


def _newcomers(view: View, running: Generation, options: LaunchGroup) -> list[Entry]:
    """Hosts that are ready, and have been for long enough, the oldest first."""
    seen = [
        one
        for one in view.seen.values()
        if one.entry.state is HostState.READY
        and not running.has(one.entry.host)
        and is_alive(one, view, options)
        and view.read_s - one.since_s >= options.grow_after_s
        and not (one.entry.host in running.excluded and one.entry.ended < running.number)
    ]
    return [one.entry for one in sorted(seen, key=lambda one: (one.since_s, one.entry.host)) if one.entry.processes > 0]


def _fitting(newcomers: Sequence[Entry], view: View, running: Generation, options: LaunchGroup) -> list[Entry]:
    """Those that `launch.max_hosts` and the global batch leave room for, and that all the others hear."""
    room = options.max_hosts - len(running.members) if options.max_hosts else len(newcomers)
    taken: list[Entry] = []
    processes, heard = running.world_size, hearing(view)
    for entry in newcomers:
        if len(taken) >= room:
            break
        if view.most_processes and processes + entry.processes > view.most_processes:
            continue
        if unheard_by(entry.host, [*(one.host for one in running.members), *(one.host for one in taken)], heard):
            continue
        taken.append(entry)
        processes += entry.processes
    return taken
