"""All that a transport plan is decided and judged by, of one host."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.infiniband import Device, read_devices
from elastictrain.preflight.transport.interfaces import (
    Addresses,
    NetworkInterface,
    Probe,
    Route,
    ask_kernel,
    find_route,
    read_interfaces,
    system_addresses,
)
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
