"""Network interfaces, and which one the kernel uses to reach an address."""

import ipaddress
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.surroundings import Surroundings

_FOLDER = "/sys/class/net"
# The host's ends of containers and virtual machines: the peer behind the same address differs from host to host.
_CONTAINER_NAME = re.compile(r"docker|br-[0-9a-f]{12}$|cni|podman|nerdctl|virbr|lxc|lxdbr|incusbr|kube-bridge|veth|cali")
_LOOPBACK_TYPE, _IPOIB_TYPE = 772, 32  # source: linux/if_arp.h
_UP = 0x1
_FASTEST_MBPS = 10_000_000  # larger values are sentinels; -1, and in older kernels 65535 and 2**32 - 1, mean unknown


class Kind(StrEnum):
    LOOPBACK = "loopback"
    CONTAINER = "container bridge"  # a bridge to containers or virtual machines, or the host's end of a veth
    CARD = "card"  # a device, a bond, a VLAN or IP over InfiniBand: only these know their speed
    OTHER = "other"  # tunnels report 10 Mbit/s and veths 10 Gbit/s, whatever is below; a container's own veth is OTHER


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """One interface; None is unknown."""

    name: str
    kind: Kind = Kind.OTHER
    running: bool | None = None  # up, with a peer at the other end
    mtu_bytes: int | None = None
    speed_gbps: float | None = None  # 10^9 bits per second
    vendor: str | None = None  # of PCI, "0x15b3"
    addresses: tuple[str, ...] = ()  # without scope, IPv4 first: gloo and NCCL listen at the first one

    @property
    def leads_nowhere(self) -> bool:
        """Whether no other host can be behind it."""
        return self.kind in (Kind.LOOPBACK, Kind.CONTAINER)

    @property
    def can_carry(self) -> bool:
        """What NCCL requires: it is running, and has an address other than ::1."""
        return self.running is not False and any(address != "::1" for address in self.addresses)


def read_interfaces(surroundings: Surroundings) -> tuple[NetworkInterface, ...]:
    """All of this host, in the kernel's order. Never raises: what cannot be read is unknown."""
    by_name = surroundings.addresses()
    names = dict.fromkeys([*surroundings.names(_FOLDER), *by_name])
    folders = [name for name in names if name in by_name or surroundings.names(f"{_FOLDER}/{name}")]
    ordered = sorted(folders, key=lambda name: (surroundings.number(f"{_FOLDER}/{name}/ifindex") or math.inf, name))
    return tuple(_interface(surroundings, name, tuple(by_name.get(name, ()))) for name in ordered)


def _interface(surroundings: Surroundings, name: str, addresses: tuple[str, ...]) -> NetworkInterface:
    folder = f"{_FOLDER}/{name}"
    entries, hardware = set(surroundings.names(folder)), surroundings.number(f"{folder}/type")
    uevent = surroundings.read(f"{folder}/uevent") or ""
    knows_speed = "device" in entries or "bonding" in entries or hardware == _IPOIB_TYPE
    kind = Kind.CARD if knows_speed or re.search(r"^DEVTYPE=(bond|vlan)$", uevent, re.MULTILINE) else Kind.OTHER
    if hardware == _LOOPBACK_TYPE or name == "lo" or (addresses and all(map(is_loopback, addresses))):
        kind = Kind.LOOPBACK
    elif "device" not in entries and _CONTAINER_NAME.match(name):
        kind = Kind.CONTAINER
    flags, state = surroundings.number(f"{folder}/flags", base=16), surroundings.read(f"{folder}/operstate")
    # Stands for IFF_RUNNING, which sysfs does not show; NCCL ignores interfaces without it.
    running = False if state in ("down", "lowerlayerdown", "notpresent", "testing", "dormant") else None
    if flags is not None and not flags & _UP:
        running = False
    elif state == "up" or (state == "unknown" and flags is not None):  # loopback and tunnels report "unknown"
        running = True
    speed = surroundings.number(f"{folder}/speed") if kind is Kind.CARD else None
    mtu = surroundings.number(f"{folder}/mtu")
    return NetworkInterface(
        name=name,
        kind=kind,
        running=running,
        mtu_bytes=mtu if mtu and mtu > 0 else None,
        speed_gbps=None if speed is None or not 0 < speed <= _FASTEST_MBPS or speed == 65535 else speed / 1000,
        vendor=surroundings.read(f"{folder}/device/vendor") or None,
        addresses=addresses,
    )


def is_loopback(address: str) -> bool:
    """Whether an address means the host that uses it: 127.0.0.0/8, ::1, and 127.0.0.0/8 mapped to IPv6."""
    with suppress(ValueError):
        return ipaddress.ip_address(_plain(address.partition("%")[0])).is_loopback
    return False


@dataclass(frozen=True, slots=True)
class Route:
    target: str  # name or address
    remote: str | None = None
    local: str | None = None
    interface: str | None = None  # None beside a `local`: unknown
    error: str = ""  # why there is no route

    @property
    def is_ipv6(self) -> bool:
        return ":" in (self.remote or "")


def find_route(target: str, *, interfaces: Sequence[NetworkInterface], surroundings: Surroundings) -> Route:
    """Ask the kernel. A name takes as long as its look-up; an address returns at once."""
    try:
        remote, local = surroundings.probe(target)
    except (OSError, UnicodeError) as error:
        return Route(target, error=getattr(error, "strerror", None) or str(error) or type(error).__name__)
    remote, local = _plain(remote), _plain(local)
    address, _, scope = local.partition("%")
    owners = [one.name for one in interfaces if address in one.addresses and scope in ("", one.name)]
    if not owners and is_loopback(address):
        # All of 127.0.0.0/8 is this host, although only 127.0.0.1 is listed.
        owners = [one.name for one in interfaces if "127.0.0.1" in one.addresses]
    return Route(target, remote.partition("%")[0], address, owners[0] if owners else None)


def _plain(address: str) -> str:
    """IPv4 mapped to IPv6 as plain IPv4, as interfaces list it."""
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        return str(getattr(parsed, "ipv4_mapped", None) or parsed)
    return address


_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # no host has these (RFC 5737, RFC 3849): their route is the default route


def way_out(targets: Sequence[str], *, interfaces: Sequence[NetworkInterface], surroundings: Surroundings) -> Route | None:
    """The route to the first target that does not lead back to this host, or the default route; None without either."""
    for target in (*targets, *_ELSEWHERE):
        route = find_route(target, interfaces=interfaces, surroundings=surroundings)
        if route.local is not None and not is_loopback(route.local):
            return route
    return None


def own_address(peers: Sequence[str], *, surroundings: Surroundings) -> str:
    """The address from which the kernel sends to the peers, or by the default route; else any that others may reach."""
    interfaces = usable_interfaces(surroundings)
    if (route := way_out(peers, interfaces=interfaces, surroundings=surroundings)) is not None and route.local:
        return route.local
    return next((one.addresses[0] for one in interfaces if one.addresses), "127.0.0.1")


def usable_interfaces(surroundings: Surroundings) -> list[NetworkInterface]:
    """Interfaces that may lead to other hosts."""
    return [one for one in read_interfaces(surroundings) if not one.leads_nowhere]
