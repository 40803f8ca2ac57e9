"""All that a transport plan is decided and judged by, of one host, and the interface that it chooses."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.infiniband import Device, read_devices
from elastictrain.preflight.transport.interfaces import (
    Addresses,
    Kind,
    NetworkInterface,
    Probe,
    Route,
    ask_kernel,
    find_route,
    read_interfaces,
    system_addresses,
)
from elastictrain.preflight.transport.patterns import NcclPattern, counts, gloo_names
from elastictrain.preflight.transport.settings import Setting, read_settings


@dataclass(frozen=True, slots=True)
class Facts:
    """One host, and its ways to the others. `peers` is by name of host, without this one."""

    host: str
    interfaces: tuple[NetworkInterface, ...] = ()
    devices: tuple[Device, ...] = ()
    rendezvous: Route | None = None
    peers: Mapping[str, Route] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    alone: bool = False
    """Whether this host is the whole world: its ranks meet nobody else."""

    def interface(self, name: str | None) -> NetworkInterface | None:
        """The one of that name."""
        return next((one for one in self.interfaces if one.name == name), None)


def read_facts(
    surroundings: Surroundings,
    *,
    rendezvous: str | None,
    peers: Mapping[str, str],
    alone: bool = False,
    addresses: Addresses = system_addresses,
    probe: Probe = ask_kernel,
) -> Facts:
    """Look at this host. `rendezvous` and `peers` (by name of host) are addresses, or names, whose look-up may take time."""
    interfaces = read_interfaces(surroundings, addresses=addresses)
    return Facts(
        host=surroundings.host,
        interfaces=interfaces,
        devices=read_devices(surroundings),
        rendezvous=find_route(rendezvous, interfaces=interfaces, probe=probe) if rendezvous else None,
        peers={name: find_route(address, interfaces=interfaces, probe=probe) for name, address in peers.items()},
        settings=read_settings(surroundings),
        alone=alone,
    )


NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Choice:
    """The interface, or None where the facts show no fit one, and why. `is_ipv6`: the peers are reached over IPv6."""

    interface: NetworkInterface | None
    reason: str
    is_ipv6: bool = False


def choose_interface(facts: Facts) -> Choice:
    """The one through which the kernel reaches most peers; the rendezvous decides between equals, and where no peer is known.

    A host that is the whole world takes loopback: gloo would look up the host's own name, and NCCL would take the first
    interface that is up, and either can be wrong or go away; loopback needs no resolver, no cable and no firewall's consent.
    """
    if facts.alone:
        loopback = next((one for one in facts.interfaces if one.kind is Kind.LOOPBACK and _can_carry(one)), None)
        return Choice(loopback, "one host: its ranks meet over loopback, whatever its name resolves to")
    peers = _by_interface(facts, list(facts.peers.values()))
    rendezvous = _by_interface(facts, [facts.rendezvous] if facts.rendezvous else [])
    votes = peers or rendezvous
    if not votes:
        return Choice(None, "the kernel reaches neither a peer nor the rendezvous through an interface that is fit for it")
    best = max(votes, key=lambda name: (votes[name], rendezvous[name], _speed(facts, name)))
    routes = [route for route in (*facts.peers.values(), facts.rendezvous) if route is not None and route.interface == best]
    reached = []
    if rendezvous[best]:
        reached.append("the rendezvous")
    if peers[best]:
        reached.append(f"{peers[best]} of {len(facts.peers)} peers")
    return Choice(
        facts.interface(best),
        f"the kernel reaches {' and '.join(reached)} through {best} ({routes[0].local})",
        routes[0].is_ipv6,
    )


def nccl_interfaces(facts: Facts, pattern: str) -> list[NetworkInterface]:
    """Those that NCCL takes for a NCCL_SOCKET_IFNAME, in its order; the first one carries its bootstrap."""
    parsed = NcclPattern.parse(pattern)
    return [one for one in facts.interfaces if parsed.matches(one.name) and _can_carry(one)]


def pinned_for_nccl(facts: Facts) -> list[NetworkInterface] | None:
    """What a person's NCCL_SOCKET_IFNAME selects; None without one."""
    setting = facts.settings.get(NCCL_INTERFACE)
    return nccl_interfaces(facts, setting.value) if setting and counts(setting.value) else None


def pinned_for_gloo(facts: Facts) -> dict[str, NetworkInterface | None] | None:
    """The interfaces that a person's GLOO_SOCKET_IFNAME names, None for a missing one; None without the setting."""
    setting = facts.settings.get(GLOO_INTERFACE)
    if setting is None or not counts(setting.value):
        return None
    return {name: facts.interface(name) for name in gloo_names(setting.value)}


def _can_carry(interface: NetworkInterface) -> bool:
    """What NCCL requires of an interface: running, and with an address other than ::1."""
    return interface.running is not False and any(address != "::1" for address in interface.addresses)


def _by_interface(facts: Facts, routes: list[Route]) -> Counter[str]:
    found = Counter[str]()
    for route in routes:
        interface = facts.interface(route.interface)
        if interface is not None and not interface.leads_nowhere:
            found[interface.name] += 1
    return found


def _speed(facts: Facts, name: str) -> float:
    interface = facts.interface(name)
    return (interface.speed_gbps if interface else None) or 0.0
