"""Which host serves the roster, and for how long after its own part has ended. Pure."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastictrain.config.roster_address import RosterAddress
from elastictrain.errors import ConfigError, Problem
from elastictrain.launch.membership.records import Entry, Generation, HostState


@dataclass(frozen=True, slots=True)
class Site:
    """What this host is to others."""

    names: tuple[str, ...]
    """What it calls itself."""

    addresses: frozenset[str]
    """At which others can reach it; none that every host has."""

    alone: bool
    """Whether no other host is expected."""


def serves(address: RosterAddress, found: Sequence[str], site: Site) -> bool:
    """Whether this host is the one that serves; `found` is what its name leads to, looked up here.

    Raises: ConfigError if every host would hold itself for that one.
    """
    addresses = [_plain(one) for one in found]
    if any(str(one) in {str(_plain(own)) for own in site.addresses} for one in addresses):
        return True
    if not addresses or not all(one.is_loopback for one in addresses):
        return False
    # Many a host looks up its own name in a file that leads to a loopback address; the others find the right one.
    if site.alone or address.host in site.names:
        return True
    message = (
        f"is {address}, which is another host for each of them ({addresses[0]}): it must be an address, or a name, of the one "
        "host that serves the roster, as the others see it"
    )
    raise ConfigError([Problem("launch.roster", message)])


def still_needed_by(lines: Iterable[Entry], newest: Generation | None, *, own: str) -> tuple[str, ...]:
    """The names of hosts that cannot go on, or end, without the roster; `lines` are those that were written of late."""
    others = {entry.host: entry for entry in lines if entry.host != own and entry.state is not HostState.GONE}
    if newest is not None and not newest.terminal and not newest.has(own) and newest.members:
        # They train without this host, and need the roster again only when something happens to one of them.
        states = [others[member.host].state if member.host in others else None for member in newest.members]
        if all(state is HostState.BUSY for state in states):
            return ()
    return tuple(entry.name for entry in others.values())


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """IPv4 in the shape of IPv6 is IPv4, and a scope says nothing here."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed
