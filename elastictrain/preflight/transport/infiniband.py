"""Devices and ports below /sys/class/infiniband, and what kinds of RDMA they allow."""

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.settings import NcclPattern, Setting

_FOLDER = "/sys/class/infiniband"
ACTIVE = "ACTIVE"
NO_LINK = ("Polling", "Disabled", "Sleep")
"""Physical states of a port with nothing at the other end."""


class LinkLayer(StrEnum):
    """What the port's cable carries."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    OTHER = "other"
    """The kernel says Unknown or Unspecified: AWS's EFA."""


_LINK_LAYERS = {
    "InfiniBand": LinkLayer.INFINIBAND,
    "Ethernet": LinkLayer.ETHERNET,
    "Unknown": LinkLayer.OTHER,
    "Unspecified": LinkLayer.OTHER,
}
_ROCE_VERSIONS = {"IB/RoCE v1": 1, "RoCE v1": 1, "RoCE v2": 2}


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

    @property
    def is_unusable(self) -> bool:
        """Whether NCCL gets nothing from it, whatever its ports do. An RNIC is a node that speaks iWARP."""
        return self.is_software or self.node_type == "RNIC"


def read_devices(surroundings: Surroundings) -> tuple[Device, ...]:
    """All of this host by name. Never raises: what cannot be read is unknown."""
    return tuple(_device(surroundings, name) for name in surroundings.names(_FOLDER))


def _device(surroundings: Surroundings, name: str) -> Device:
    folder = f"{_FOLDER}/{name}"
    driver = re.search(r"^DRIVER=(\S+)$", surroundings.read(f"{folder}/device/uevent") or "", re.MULTILINE)
    parents = surroundings.names(f"{folder}/device/physfn/infiniband")
    verbs = surroundings.names(f"{folder}/device/infiniband_verbs")
    nodes = surroundings.names("/dev/infiniband")
    return Device(
        name=name,
        ports=tuple(_port(surroundings, f"{folder}/ports", number) for number in _numbers(surroundings, f"{folder}/ports")),
        node_type=_word(surroundings.read(f"{folder}/node_type")),
        driver=driver.group(1) if driver else None,
        is_software=not surroundings.names(f"{folder}/device"),
        physical_function=parents[0] if parents else None,
        can_be_opened=any(one in nodes for one in verbs) if verbs else None,
        netdevs=tuple(surroundings.names(f"{folder}/device/net")),
    )


def _port(surroundings: Surroundings, ports: str, number: int) -> Port:
    folder = f"{ports}/{number}"
    layer = _LINK_LAYERS.get(surroundings.read(f"{folder}/link_layer") or "")
    indices = _numbers(surroundings, f"{folder}/gids")
    gids = [_gid(surroundings, folder, index, layer) for index in indices]
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
    version = _ROCE_VERSIONS.get(surroundings.read(f"{folder}/gid_attrs/types/{index}") or "")
    return Gid(index, address, version, surroundings.read(f"{folder}/gid_attrs/ndevs/{index}") or None)


def _numbers(surroundings: Surroundings, folder: str) -> list[int]:
    return sorted(int(name) for name in surroundings.names(folder) if name.isascii() and name.isdecimal())


def _word(text: str | None) -> str | None:
    """The word of "4: ACTIVE"."""
    match = re.fullmatch(r"\d+: (\w[\w ]*)", text or "", re.ASCII)
    return match.group(1) if match else None


def _rate(text: str | None) -> float | None:
    """Of "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)"."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec\b", text or "", re.ASCII)
    rate = float(match.group(1)) if match else 0.0
    return rate if 0 < rate < math.inf else None


HCA = "NCCL_IB_HCA"
GID_INDEX = "NCCL_IB_GID_INDEX"
DISABLE = "NCCL_IB_DISABLE"
NET = "NCCL_NET"

_BY_HAND = {GID_INDEX, "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM"}
"""Who sets one of these knows of RoCE that we would not take, over IPv6 or of version 1: it is not switched off."""

SLOW_PORT = 0.5
"""A port with less than this share of the fastest one's rate is another network (storage, management), or broken: NCCL would
give it a share of the work all the same."""


class Rdma(StrEnum):
    """How hosts move data other than through sockets, the better ones first."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    """AWS's own, which NCCL uses through a plugin and needs no variable for."""

    NONE = "none"
    UNKNOWN = "unknown"
    """There are devices, and what they are cannot be read: NCCL is left to find out."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port that NCCL can use."""

    device: Device
    port: Port

    @property
    def name(self) -> str:
        """DEVICE:PORT, as NCCL_IB_HCA takes it."""
        return f"{self.device.name}:{self.port.number}"


@dataclass(frozen=True, slots=True)
class RdmaPlan:
    """The kind and its ports. `gid_index`: the one that is right for all of them; None where none is, or none is needed."""

    kind: Rdma
    endpoints: tuple[Endpoint, ...] = ()
    gid_index: int | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rate_gbps(self) -> float | None:
        """Of all ports together."""
        rates = [endpoint.port.rate_gbps for endpoint in self.endpoints]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known and len(known) == len(rates) else None


def kind_of(endpoint: Endpoint) -> Rdma:
    """What this port is good for now."""
    device, port = endpoint.device, endpoint.port
    if device.is_unusable or device.can_be_opened is False:
        return Rdma.NONE
    if port.state is None:
        return Rdma.UNKNOWN
    if port.state != ACTIVE:
        return Rdma.NONE
    if device.driver == "efa":
        return Rdma.EFA
    if port.link_layer is LinkLayer.INFINIBAND:
        return Rdma.INFINIBAND
    if port.link_layer is LinkLayer.ETHERNET:
        if not port.gids_are_known:
            return Rdma.UNKNOWN
        return Rdma.ROCE if roce_v2_gids(port) else Rdma.NONE
    return Rdma.UNKNOWN if port.link_layer is None else Rdma.NONE


def roce_v2_gids(port: Port) -> list[Gid]:
    """GIDs for RoCE v2 over IPv4, by index; those of link-local addresses only where there is no other.

    Source: NCCL's own choice with NCCL_IB_ADDR_FAMILY=AF_INET and NCCL_IB_ROCE_VERSION_NUM=2, its defaults.
    """
    found = [gid for gid in port.gids if gid.roce_version == 2 and gid.ipv4 is not None]
    return [gid for gid in found if gid.ipv4 is not None and not gid.ipv4.is_link_local] or found


def endpoints(devices: Sequence[Device], settings: Mapping[str, Setting]) -> list[Endpoint]:
    """All ports, or those that a person's NCCL_IB_HCA selects."""
    pinned = settings.get(HCA)
    pattern = NcclPattern.parse(pinned.value if pinned else "")
    return [Endpoint(device, port) for device in devices for port in device.ports if pattern.matches(device.name, port.number)]


def kinds_here(devices: Sequence[Device], *, settings: Mapping[str, Setting]) -> frozenset[Rdma]:
    """What this host can use, to be compared with the others' by `common`."""
    if switched_off(settings) is not None:
        return frozenset()
    usable = endpoints(devices, settings)
    found = frozenset(map(kind_of, usable)) - {Rdma.NONE}
    if not found and _BY_HAND & settings.keys() and any(_is_active_ethernet(one) for one in usable):
        return frozenset({Rdma.UNKNOWN})
    return found - {Rdma.UNKNOWN} or found


def common(kinds: Mapping[str, Set[Rdma]]) -> Rdma:
    """The best that every host (by name) can do: NCCL with InfiniBand on one end and sockets on the other hangs or fails.

    Where a host does not know what it can do, nothing is decided for anybody.
    """
    if any(Rdma.UNKNOWN in one for one in kinds.values()):
        return Rdma.UNKNOWN
    for kind in (Rdma.INFINIBAND, Rdma.ROCE, Rdma.EFA):
        if kinds and all(kind in one for one in kinds.values()):
            return kind
    return Rdma.NONE


def decide_rdma(devices: Sequence[Device], *, settings: Mapping[str, Setting], agreed: Rdma | None) -> RdmaPlan:
    """InfiniBand before RoCE, never both: NCCL does not join ports of the two. `agreed`: what all hosts can do, if known."""
    if (off := switched_off(settings)) is not None:
        return RdmaPlan(Rdma.NONE, reason=off)
    here = kinds_here(devices, settings=settings)
    kind = next((kind for kind in Rdma if kind in here), Rdma.NONE) if agreed is None else agreed
    if kind is Rdma.NONE:
        own = " or ".join(sorted(here - {Rdma.UNKNOWN}))
        reason = f"this host has {own}, but not every host of the run has it"
        return RdmaPlan(kind, reason=reason if own else "no port that is ACTIVE can be used here")
    usable = [one for one in endpoints(devices, settings) if kind_of(one) is kind]
    if kind in (Rdma.EFA, Rdma.UNKNOWN) or not usable:
        return RdmaPlan(kind)
    chosen, notes = (usable, []) if HCA in settings else _sift(usable)
    plan = RdmaPlan(kind, tuple(chosen), reason=f"all that are ACTIVE: {kind.value}", notes=tuple(notes))
    return _with_gid_index(plan) if kind is Rdma.ROCE and chosen else plan


def _is_active_ethernet(one: Endpoint) -> bool:
    usable = not one.device.is_software and one.device.can_be_opened is not False
    return usable and one.port.state == ACTIVE and one.port.link_layer is LinkLayer.ETHERNET


def switched_off(settings: Mapping[str, Setting]) -> str | None:
    """How a person has told NCCL to use sockets only; None if nobody has."""
    if (setting := settings.get(DISABLE)) is not None and setting.number:
        return f"{DISABLE}={setting.value} is set in {setting.origin}"
    if (setting := settings.get(NET)) is not None and setting.value.lower() == "socket":
        return f"{NET}={setting.value} is set in {setting.origin}"
    return None


def _sift(usable: list[Endpoint]) -> tuple[list[Endpoint], list[str]]:
    names = {one.device.name for one in usable}
    notes = []
    chosen = []
    fastest = max((one.port.rate_gbps or 0.0 for one in usable), default=0.0)
    for one in usable:
        rate = one.port.rate_gbps
        if one.device.physical_function in names:
            notes.append(f"{one.name} is left out: a virtual function of {one.device.physical_function}, on the same cable")
        elif rate is not None and rate < SLOW_PORT * fastest:
            notes.append(f"{one.name} is left out: {rate:g} Gb/s, where the fastest port has {fastest:g} Gb/s")
        else:
            chosen.append(one)
    return chosen, notes


def _with_gid_index(plan: RdmaPlan) -> RdmaPlan:
    """One variable is for all ports: where their indices differ, NCCL finds out by itself (since 2.21), port by port."""
    indices = [{gid.index for gid in roce_v2_gids(endpoint.port)} for endpoint in plan.endpoints]
    if shared := set.intersection(*indices):
        return replace(plan, gid_index=min(shared))
    listed = ", ".join(f"{one.name}: {min(found)}" for one, found in zip(plan.endpoints, indices, strict=True))
    note = f"{GID_INDEX} is left to NCCL: RoCE v2 over IPv4 has another index on each port ({listed})"
    return replace(plan, notes=(*plan.notes, note))
