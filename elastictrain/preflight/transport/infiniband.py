"""Devices and ports below /sys/class/infiniband, and what kinds of RDMA they allow."""

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from elastictrain.preflight.transport.settings import NcclPattern, Setting
from elastictrain.surroundings import Surroundings

HCA = "NCCL_IB_HCA"
GID_INDEX = "NCCL_IB_GID_INDEX"
DISABLE = "NCCL_IB_DISABLE"
NET = "NCCL_NET"

_FOLDER = "/sys/class/infiniband"
ACTIVE = "ACTIVE"
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"

_LINK_LAYERS = (INFINIBAND, ETHERNET, "Unknown", "Unspecified")  # the last two: AWS EFA
_ROCE_VERSIONS = {"IB/RoCE v1": 1, "RoCE v1": 1, "RoCE v2": 2}

# A person who sets one of these uses RoCE that the plan would not take, over IPv6 or of version 1: RDMA stays on.
_BY_HAND = {GID_INDEX, "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM"}
SLOW_PORT = 0.5  # share of the fastest port's rate; below it, another network or a broken port: NCCL would load it equally


class Rdma(StrEnum):
    """How hosts move data other than through sockets, the best first."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    ROCE_IPV6 = "roce_ipv6"  # on hosts without an IPv4 address there
    EFA = "efa"  # of AWS; NCCL uses it through a plugin and needs no variable
    NONE = "none"
    UNKNOWN = "unknown"  # devices that cannot be read: NCCL finds out


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    address: ipaddress.IPv6Address
    roce_version: int | None = None  # None: not Ethernet, or it cannot be read
    netdev: str | None = None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        return self.address.ipv4_mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of a device; None is unknown."""

    name: str  # DEVICE:PORT, as NCCL_IB_HCA takes it
    device: "Device"
    number: int
    state: str | None  # DOWN, INIT, ARMED or ACTIVE
    physical_state: str | None  # LinkUp, Polling, Disabled and so on
    link_layer: str | None  # what its cable carries, in the kernel's words
    rate_gbps: float | None
    gids: tuple[Gid, ...]  # those that are not empty
    gids_are_known: bool

    @property
    def kind(self) -> Rdma:
        """The RDMA that it allows now."""
        if not self.device.is_usable or self.device.node_type == "RNIC":
            return Rdma.NONE
        if self.state is None:
            return Rdma.UNKNOWN
        if self.state != ACTIVE:
            return Rdma.NONE
        if self.device.driver == "efa":
            return Rdma.EFA
        if self.link_layer == ETHERNET and self.gids_are_known:
            gids = self.roce_v2_gids()
            return Rdma.NONE if not gids else Rdma.ROCE if gids[0].ipv4 else Rdma.ROCE_IPV6
        if self.link_layer == INFINIBAND:
            return Rdma.INFINIBAND
        return Rdma.UNKNOWN if self.link_layer in (None, ETHERNET) else Rdma.NONE

    def roce_v2_gids(self) -> list[Gid]:
        """GIDs for RoCE v2 over IPv4, by index, link-local addresses only if there is no other; else over IPv6. Source: NCCL's
        choice with NCCL_IB_ROCE_VERSION_NUM=2, its default, and NCCL_IB_ADDR_FAMILY=AF_INET (its default) or AF_INET6."""
        found = [gid for gid in self.gids if gid.roce_version == 2]
        over_ipv4 = [gid for gid in found if gid.ipv4 is not None]
        routable = [gid for gid in over_ipv4 if gid.ipv4 is not None and not gid.ipv4.is_link_local]
        return routable or over_ipv4 or [gid for gid in found if not gid.address.is_link_local]

    def is_below(self, interface: str | None) -> bool:
        """Whether it is the RDMA of a network interface."""
        return interface in {*self.device.netdevs, *(gid.netdev for gid in self.gids)} - {None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device; None is unknown."""

    name: str
    node_type: str | None
    driver: str | None
    is_software: bool  # RDMA on an ordinary network card: no faster than sockets
    physical_function: str | None  # this device is a virtual function of it, if visible here
    can_be_opened: bool | None  # /dev/infiniband has its files; containers often see /sys without them
    netdevs: tuple[str, ...]
    is_enslaved: bool = False  # its network interface is part of another one, which has the addresses (Azure, bonds)

    @property
    def is_usable(self) -> bool:
        """Whether programs gain anything by opening it."""
        return not self.is_software and self.can_be_opened is not False


def read_devices(surroundings: Surroundings) -> dict[Device, tuple[Port, ...]]:
    """All of this host by name, with their ports. Never raises: what cannot be read is unknown."""
    found = {}
    for name in surroundings.names(_FOLDER):
        folder = f"{_FOLDER}/{name}"
        driver = re.search(r"^DRIVER=(\S+)$", surroundings.read(f"{folder}/device/uevent") or "", re.MULTILINE)
        parents = surroundings.names(f"{folder}/device/physfn/infiniband")
        verbs = surroundings.names(f"{folder}/device/infiniband_verbs")
        nodes = surroundings.names("/dev/infiniband")
        device = Device(
            name=name,
            node_type=_word(surroundings.read(f"{folder}/node_type")),
            driver=driver.group(1) if driver else None,
            is_software=not surroundings.names(f"{folder}/device"),
            physical_function=parents[0] if parents else None,
            can_be_opened=any(one in nodes for one in verbs) if verbs else None,
            netdevs=(netdevs := tuple(surroundings.names(f"{folder}/device/net"))),
            is_enslaved=any(surroundings.names(f"/sys/class/net/{netdev}/master") for netdev in netdevs),
        )
        numbers = _numbers(surroundings, f"{folder}/ports")
        found[device] = tuple(_port(surroundings, f"{folder}/ports/{number}", device, number) for number in numbers)
    return found


def _port(surroundings: Surroundings, folder: str, device: Device, number: int) -> Port:
    layer = surroundings.read(f"{folder}/link_layer")
    layer = layer if layer in _LINK_LAYERS else None
    indices = _numbers(surroundings, f"{folder}/gids")
    gids = [_gid(surroundings, folder, index, layer) for index in indices]
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec\b", surroundings.read(f"{folder}/rate") or "", re.ASCII)
    rate_gbps = float(rate.group(1)) if rate else 0.0
    return Port(
        name=f"{device.name}:{number}",
        device=device,
        number=number,
        state=_word(surroundings.read(f"{folder}/state")),
        physical_state=_word(surroundings.read(f"{folder}/phys_state")),
        link_layer=layer,
        rate_gbps=rate_gbps if 0 < rate_gbps < math.inf else None,
        gids=tuple(gid for gid in gids if gid is not None),
        gids_are_known=bool(indices),
    )


def _gid(surroundings: Surroundings, folder: str, index: int, layer: str | None) -> Gid | None:
    """None for an empty GID, as most of the 256 of a port are, and for one of another namespace, which cannot be read."""
    try:
        address = ipaddress.IPv6Address(surroundings.read(f"{folder}/gids/{index}") or "")
    except ValueError:
        return None
    if not int(address):
        return None
    if layer == INFINIBAND:
        return Gid(index, address)
    version = _ROCE_VERSIONS.get(surroundings.read(f"{folder}/gid_attrs/types/{index}") or "")
    return Gid(index, address, version, surroundings.read(f"{folder}/gid_attrs/ndevs/{index}") or None)


def _numbers(surroundings: Surroundings, folder: str) -> list[int]:
    return sorted(int(name) for name in surroundings.names(folder) if name.isascii() and name.isdecimal())


def _word(text: str | None) -> str | None:
    """`ACTIVE` of "4: ACTIVE"."""
    match = re.fullmatch(r"\d+: (\w[\w ]*)", text or "", re.ASCII)
    return match.group(1) if match else None


def chosen_ports(ports: Sequence[Port], settings: Mapping[str, Setting]) -> list[Port]:
    """All ports, or those that a person's NCCL_IB_HCA selects."""
    pinned = settings.get(HCA)
    pattern = NcclPattern.parse(pinned.value if pinned else "")
    return [port for port in ports if pattern.matches(port.device.name, port.number)]


def kinds_here(ports: Sequence[Port], *, settings: Mapping[str, Setting]) -> frozenset[Rdma]:
    """What this host can use, input of `common`."""
    if switched_off(settings) is not None:
        return frozenset()
    chosen = chosen_ports(ports, settings)
    found = frozenset(port.kind for port in chosen) - {Rdma.NONE}
    ethernet = (one for one in chosen if one.device.is_usable and one.state == ACTIVE and one.link_layer == ETHERNET)
    if not found and _BY_HAND & settings.keys() and any(ethernet):
        return frozenset({Rdma.UNKNOWN})
    return found - {Rdma.UNKNOWN} or found


def common(kinds: Mapping[str, Set[Rdma]]) -> Rdma:
    """The best kind that every host has, as NCCL with InfiniBand on one end only hangs or fails; UNKNOWN leaves it to NCCL."""
    if any(Rdma.UNKNOWN in one for one in kinds.values()):
        return Rdma.UNKNOWN
    for kind in (Rdma.INFINIBAND, Rdma.ROCE, Rdma.ROCE_IPV6, Rdma.EFA):
        if kinds and all(kind in one for one in kinds.values()):
            return kind
    return Rdma.NONE


def switched_off(settings: Mapping[str, Setting]) -> str | None:
    """The setting by which a person restricts NCCL to sockets; None without one."""
    if (setting := settings.get(DISABLE)) is not None and setting.number:
        return f"{DISABLE}={setting.value} is set in {setting.origin}"
    if (setting := settings.get(NET)) is not None and setting.value.lower() == "socket":
        return f"{NET}={setting.value} is set in {setting.origin}"
    return None


@dataclass(frozen=True, slots=True)
class RdmaPlan:
    kind: Rdma
    ports: tuple[Port, ...] = ()
    gid_index: int | None = None  # right for all ports; None: none is, or none is needed
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rate_gbps(self) -> float | None:
        """Sum over all ports; None if one is unknown."""
        known = [port.rate_gbps for port in self.ports if port.rate_gbps is not None]
        return sum(known) if known and len(known) == len(self.ports) else None


def decide_rdma(
    ports: Sequence[Port], *, settings: Mapping[str, Setting], agreed: Rdma, interface: str | None = None
) -> RdmaPlan:
    """InfiniBand or RoCE, as NCCL does not join the two. `agreed`: as by `common`. `interface`: by which the hosts meet."""
    if (off := switched_off(settings)) is not None:
        return RdmaPlan(Rdma.NONE, reason=off)
    if agreed is Rdma.NONE:
        own = " or ".join(sorted(kinds_here(ports, settings=settings) - {Rdma.UNKNOWN}))
        reason = f"this host has {own}, but not every host of the run has it"
        return RdmaPlan(agreed, reason=reason if own else "no port that is ACTIVE can be used here")
    usable = [port for port in chosen_ports(ports, settings) if port.kind is agreed]
    if agreed in (Rdma.EFA, Rdma.UNKNOWN) or not usable:
        return RdmaPlan(agreed)
    chosen, notes = (usable, []) if HCA in settings else _sift(usable, interface)
    plan = RdmaPlan(agreed, tuple(chosen), reason=f"all that are ACTIVE: {agreed.value}", notes=tuple(notes))
    if agreed is Rdma.INFINIBAND or not chosen:
        return plan
    # One variable serves all ports: where their indices differ, NCCL (since 2.21) finds them itself, port by port.
    indices = [{gid.index for gid in port.roce_v2_gids()} for port in chosen]
    if shared := set.intersection(*indices):
        return replace(plan, gid_index=min(shared))
    listed = ", ".join(f"{port.name}: {min(found)}" for port, found in zip(chosen, indices, strict=True))
    note = f"{GID_INDEX} is left to NCCL: RoCE v2 has another index on each port ({listed})"
    return replace(plan, notes=(*notes, note))


def _sift(usable: list[Port], interface: str | None) -> tuple[list[Port], list[str]]:
    names = {port.device.name for port in usable}
    fastest = max((port.rate_gbps or 0.0 for port in usable), default=0.0)
    chosen, notes = [], []
    for port in usable:
        rate, parent = port.rate_gbps, port.device.physical_function
        if parent in names:
            notes.append(f"{port.name} is left out: a virtual function of {parent}, on the same cable")
        elif rate is not None and rate < SLOW_PORT * fastest:
            notes.append(f"{port.name} is left out: {rate:g} Gb/s, where the fastest port has {fastest:g} Gb/s")
        else:
            chosen.append(port)
    # Clouds (Oracle's) give hosts one more port for everything else; an even number of equal ports are all rails.
    even = len(chosen) % 2 == 0 and len({port.rate_gbps for port in chosen}) == 1
    rails = [port for port in chosen if not (port.link_layer == ETHERNET and port.is_below(interface))]
    if even or not rails or len(rails) == len(chosen):
        return chosen, notes
    left_out = ", ".join(port.name for port in chosen if port not in rails)
    return rails, [*notes, f"{left_out} is left out: it belongs to {interface}, by which the hosts meet, and there are others"]
