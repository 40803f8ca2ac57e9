"""Facts about InfiniBand, RoCE and similar devices, from sysfs."""

import ipaddress
import math
import re
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.preflight.surroundings import Surroundings

_FOLDER = "/sys/class/infiniband"
ACTIVE = "ACTIVE"
NO_LINK = ("Polling", "Disabled", "Sleep")
"""Physical states of a port with nothing at the other end."""

RNIC = "RNIC"
"""Type of a node that speaks iWARP."""


class LinkLayer(StrEnum):
    """What the port's cable carries."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    OTHER = "other"
    """The kernel says Unknown or Unspecified: AWS's EFA."""


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port. `roce_version` is None where the port is not Ethernet, or it cannot be read."""

    index: int
    address: ipaddress.IPv6Address
    roce_version: int | None = None
    netdev: str | None = None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The address that it maps; None if it maps none."""
        return self.address.ipv4_mapped


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device; None is unknown. `gids` are those that are not empty."""

    number: int
    state: str | None = None
    """DOWN, INIT, ARMED or ACTIVE."""
    physical_state: str | None = None
    """LinkUp, Polling, Disabled, ..."""
    link_layer: LinkLayer | None = None
    rate_gbps: float | None = None
    gids: tuple[Gid, ...] = ()
    gids_are_known: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its ports."""

    name: str
    ports: tuple[Port, ...] = ()
    node_type: str | None = None
    driver: str | None = None
    is_software: bool = False
    """RDMA made of an ordinary network card: no faster than its sockets."""
    physical_function: str | None = None
    """The device that this one is a virtual function of, if that is seen here."""
    can_be_opened: bool | None = None
    """Whether /dev/infiniband has what programs need to use it: containers see what is in /sys, and often lack the other."""
    netdevs: tuple[str, ...] = ()


def read_devices(surroundings: Surroundings) -> tuple[Device, ...]:
    """All of this host by name. Never raises: what cannot be read is unknown."""
    return tuple(_device(surroundings, name) for name in surroundings.names(_FOLDER))


def _device(surroundings: Surroundings, name: str) -> Device:
    folder = f"{_FOLDER}/{name}"
    driver = re.search(r"^DRIVER=(\S+)$", surroundings.read(f"{folder}/device/uevent") or "", re.MULTILINE)
    parents = surroundings.names(f"{folder}/device/physfn/infiniband")
    verbs = surroundings.names(f"{folder}/device/infiniband_verbs")
    nodes = surroundings.names("/dev/infiniband")
    numbers = [number for number in surroundings.names(f"{folder}/ports") if number.isascii() and number.isdecimal()]
    return Device(
        name=name,
        ports=tuple(_port(surroundings, f"{folder}/ports/{number}", int(number)) for number in sorted(numbers, key=int)),
        node_type=_word(surroundings.read(f"{folder}/node_type")),
        driver=driver.group(1) if driver else None,
        is_software=not surroundings.names(f"{folder}/device"),
        physical_function=parents[0] if parents else None,
        can_be_opened=any(one in nodes for one in verbs) if verbs else None,
        netdevs=tuple(surroundings.names(f"{folder}/device/net")),
    )


def _port(surroundings: Surroundings, folder: str, number: int) -> Port:
    layer = {
        "InfiniBand": LinkLayer.INFINIBAND,
        "Ethernet": LinkLayer.ETHERNET,
        "Unknown": LinkLayer.OTHER,
        "Unspecified": LinkLayer.OTHER,
    }.get(surroundings.read(f"{folder}/link_layer") or "")
    indices = [name for name in surroundings.names(f"{folder}/gids") if name.isascii() and name.isdecimal()]
    gids = [_gid(surroundings, folder, int(index), layer) for index in sorted(indices, key=int)]
    return Port(
        number=number,
        state=_word(surroundings.read(f"{folder}/state")),
        physical_state=_word(surroundings.read(f"{folder}/phys_state")),
        link_layer=layer,
        rate_gbps=_rate(surroundings.read(f"{folder}/rate")),
        gids=tuple(gid for gid in gids if gid is not None),
        gids_are_known=bool(indices),
    )


def _gid(surroundings: Surroundings, folder: str, index: int, layer: LinkLayer | None) -> Gid | None:
    """None for an empty one, as most of the 256 of a port are, and for one of another namespace, which cannot be read."""
    try:
        address = ipaddress.IPv6Address(surroundings.read(f"{folder}/gids/{index}") or "")
    except ValueError:
        return None
    if not int(address):
        return None
    if layer is LinkLayer.INFINIBAND:
        return Gid(index, address)
    version = {"IB/RoCE v1": 1, "RoCE v1": 1, "RoCE v2": 2}.get(surroundings.read(f"{folder}/gid_attrs/types/{index}") or "")
    return Gid(index, address, version, surroundings.read(f"{folder}/gid_attrs/ndevs/{index}") or None)


def _word(text: str | None) -> str | None:
    """The word of "4: ACTIVE"."""
    match = re.fullmatch(r"\d+: (\w[\w ]*)", text or "", re.ASCII)
    return match.group(1) if match else None


def _rate(text: str | None) -> float | None:
    """Of "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)"."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec\b", text or "", re.ASCII)
    rate = float(match.group(1)) if match else 0.0
    return rate if 0 < rate < math.inf else None
