"""The transport plan: a host's interface and its NCCL and gloo variables. Pure but for `read_facts` and `apply_plan`."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from elastictrain.net.interfaces import Kind, NetworkInterface, Route, find_route, read_interfaces
from elastictrain.preflight.transport import infiniband
from elastictrain.preflight.transport.infiniband import Device, Port, Rdma, RdmaPlan, decide_rdma, read_devices
from elastictrain.preflight.transport.settings import OWN_VARIABLES, Setting, own_variables, read_settings
from elastictrain.surroundings import Surroundings

# From this rate on 4 threads with 4 sockets each. Source: NCCL's manual, "for generic 100G networks", for both variables.
FAST_GBPS = 100.0
# From this rate on 4 threads with one socket each: one does not fill the link. Source: NCCL's own for Google's cards.
MEDIUM_GBPS = 25.0
# PCI vendors (AWS, Google) for whose cards NCCL sets the numbers itself. Source: its `ncclNetSocketGetNsockNthread`.
_TUNED_BY_NCCL = ("0x1d0f", "0x1ae0")
# What a person's settings mean. Source: NCCL's manual.
EXPLAINED = {
    "NCCL_P2P_LEVEL": "GPUs reach each other directly never (LOC), by NVLink (NVL), below one PCIe switch (PIX), across PCIe "
    "switches (PXB), on one NUMA node (PHB) or across them (SYS), and through host memory where they are farther apart",
    "NCCL_CROSS_NIC": "a ring uses the same port on all hosts (0, for rails that are not joined), any (1), or the better (2)",
}
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
TOPOLOGY = "NCCL_TOPO_FILE"
_PLUGIN_FOLDERS = (
    *("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib", "/var/lib/tcpxo/lib64", "/usr/lib64"),
    *("/usr/local/nvidia/lib64", "/usr/local/gib/lib64", "/usr/local/lib", "/usr/lib", "/usr/lib/x86_64-linux-gnu"),
)


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """One host, and its routes to the others."""

    host: str
    interfaces: tuple[NetworkInterface, ...] = ()
    devices: Mapping[Device, tuple[Port, ...]] = field(default_factory=dict)
    rendezvous: Route | None = None
    peers: Mapping[str, Route] = field(default_factory=dict)  # by name of host, without this one
    settings: Mapping[str, Setting] = field(default_factory=dict)
    alone: bool = False  # no other host takes part
    vendor: str = ""  # of the machine, as its firmware says
    plugins: tuple[str, ...] = ()  # NCCL's network plugins
    lacks_topology: bool = False  # the file of `TOPOLOGY` is not there

    @property
    def ports(self) -> list[Port]:
        return [port for ports in self.devices.values() for port in ports]

    def interface(self, name: str | None) -> NetworkInterface | None:
        return next((one for one in self.interfaces if one.name == name), None)


def read_facts(surroundings: Surroundings, *, rendezvous: str | None, alone: bool = False) -> TransportFacts:
    """Read the facts of this host. `rendezvous`: an address, or a name, whose look-up may take time."""
    interfaces, settings, environment = read_interfaces(surroundings), read_settings(surroundings), surroundings.environment
    folders = [*filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")), *_PLUGIN_FOLDERS]
    plugins = (name for folder in folders for name in surroundings.names(folder) if name.startswith("libnccl-net"))
    return TransportFacts(
        host=surroundings.host,
        interfaces=interfaces,
        devices=read_devices(surroundings),
        rendezvous=find_route(rendezvous, interfaces=interfaces, surroundings=surroundings) if rendezvous else None,
        settings=settings,
        alone=alone,
        vendor=surroundings.read("/sys/class/dmi/id/sys_vendor") or "",
        plugins=tuple(dict.fromkeys(plugins)),
        lacks_topology=TOPOLOGY in settings and surroundings.read(settings[TOPOLOGY].value) is None,
    )


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """The interface, or None and why the facts show no fit one."""

    interface: NetworkInterface | None
    reason: str
    is_ipv6: bool = False  # peers are reached over IPv6


def choose_interface(facts: TransportFacts) -> InterfaceChoice:
    """The interface through which the kernel reaches most peers; the rendezvous breaks ties, and decides if no peer is known. A
    single host takes loopback: gloo would look up the host's own name, and NCCL would take the first interface that is up.
    Either can be wrong or disappear; loopback needs no resolver, no cable and no firewall rule."""
    if facts.alone:
        loopback = next((one for one in facts.interfaces if one.kind is Kind.LOOPBACK and one.can_carry), None)
        return InterfaceChoice(loopback, "one host: its ranks meet over loopback, whatever its name resolves to")
    fit: dict[str | None, NetworkInterface] = {one.name: one for one in facts.interfaces if not one.leads_nowhere}
    routes = [*facts.peers.values(), *([facts.rendezvous] if facts.rendezvous else [])]
    peers = Counter(route.interface for route in facts.peers.values() if route.interface in fit)
    meeting = facts.rendezvous.interface if facts.rendezvous else None
    votes = peers or Counter(name for name in [meeting] if name in fit)
    if not votes:
        return InterfaceChoice(None, "the kernel reaches no peer and no rendezvous through an interface that is fit for it")
    best = max(votes, key=lambda name: (votes[name], name == meeting, fit[name].speed_gbps or 0.0))
    reached = ["the rendezvous"] if best == meeting else []
    if peers[best]:
        reached.append(f"{peers[best]} of {len(facts.peers)} peers")
    route = next(route for route in routes if route.interface == best)
    why = f"the kernel reaches {' and '.join(reached)} through {best} ({route.local})"
    return InterfaceChoice(fit[best], why, route.is_ipv6)


@dataclass(frozen=True, slots=True)
class PlannedVariable:
    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransportPlan:
    host: str
    variables: tuple[PlannedVariable, ...]  # to be set
    kept: tuple[PlannedVariable, ...]  # set by a person; the reason names what would have been planned
    interface: str | None  # the kernel's for the peers; None: unknown, or none is fit
    rdma: Rdma
    hcas: tuple[str, ...]  # DEVICE:PORT of each port that NCCL is to use
    link_gbps: float | None  # of all those ports together, or of the interface; None: unknown
    notes: tuple[str, ...] = ()


def decide_transport(facts: TransportFacts, *, agreed: Rdma, after_failure: bool = False) -> TransportPlan:
    """The plan for this host. `agreed`: what all hosts can do (`infiniband.common`)."""
    choice = choose_interface(facts)
    interface = choice.interface
    device = interface.name if interface else None
    rdma = decide_rdma(facts.ports, settings=facts.settings, agreed=agreed, interface=device)
    planned, kept = list(_planned(choice, rdma, after_failure=after_failure)), []
    for one in planned:
        if (setting := facts.settings.get(one.name)) is not None:
            same = "as planned" if setting.value == one.value else f"{one.value} was planned: {one.reason}"
            kept.append(PlannedVariable(one.name, setting.value, f"set in {setting.origin}; {same}"))
    notes = rdma.notes if interface is not None else (f"no interface is set: {choice.reason}", *rdma.notes)
    given = {name: facts.settings[name] for name in EXPLAINED if name in facts.settings}
    notes += tuple(f"{name}={one.value} (set in {one.origin}): {EXPLAINED[name]}" for name, one in given.items())
    return TransportPlan(
        host=facts.host,
        variables=tuple(one for one in planned if one.name not in facts.settings),
        kept=tuple(kept),
        interface=device,
        rdma=rdma.kind,
        hcas=tuple(port.name for port in rdma.ports),
        link_gbps=rdma.rate_gbps if rdma.ports else (interface.speed_gbps if interface else None),
        notes=notes,
    )


def describe_plan(plan: TransportPlan) -> list[str]:
    lines = [f"{one.name}={one.value}  # {one.reason}" for one in plan.variables]
    lines += [f"{one.name}={one.value}  # kept: {one.reason}" for one in plan.kept]
    return [*lines, *(f"# {one}" for one in plan.notes)]


def _planned(choice: InterfaceChoice, rdma: RdmaPlan, *, after_failure: bool) -> Iterator[PlannedVariable]:
    interface = choice.interface
    if interface is not None:
        # Without "=" it is a prefix: eth1 also matches eth10.
        yield PlannedVariable(NCCL_INTERFACE, f"={interface.name}", choice.reason)
        yield PlannedVariable(GLOO_INTERFACE, interface.name, choice.reason)
        if choice.is_ipv6 and any(":" not in address for address in interface.addresses):
            reason = f"peers are reached over IPv6, and NCCL would take the IPv4 of {interface.name}"
            yield PlannedVariable("NCCL_SOCKET_FAMILY", "AF_INET6", reason)
    if rdma.kind is Rdma.NONE:
        yield PlannedVariable(infiniband.DISABLE, "1", rdma.reason)
    if rdma.ports:
        yield PlannedVariable(infiniband.HCA, "=" + ",".join(port.name for port in rdma.ports), rdma.reason)
    if rdma.gid_index is not None:
        yield PlannedVariable(infiniband.GID_INDEX, str(rdma.gid_index), "RoCE v2 on each of these ports")
    if rdma.kind is Rdma.ROCE_IPV6:
        yield PlannedVariable("NCCL_IB_ADDR_FAMILY", "AF_INET6", "these ports have no IPv4 address")
    if interface is not None and rdma.kind is Rdma.NONE and interface.vendor not in _TUNED_BY_NCCL:
        speed = interface.speed_gbps or 0.0
        if speed >= MEDIUM_GBPS:
            reason = f"one socket does not fill {speed:g} Gb/s of {interface.name}"
            yield PlannedVariable("NCCL_SOCKET_NTHREADS", "4", reason)
            yield PlannedVariable("NCCL_NSOCKS_PERTHREAD", "4" if speed >= FAST_GBPS else "1", reason)
    if after_failure:
        reason = "the last start failed in its transport"
        yield PlannedVariable("NCCL_DEBUG", "INFO", reason)
        yield PlannedVariable("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET", reason)


def apply_plan(plan: TransportPlan, environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set the plan's variables, before the first process group, and remove those of an earlier plan. Returns what was set."""
    for name, value in own_variables(environment).items():
        if environment.get(name) == value:
            del environment[name]
    done: dict[str, str] = {}
    for variable in plan.variables:
        # NCCL and gloo treat an empty value as not set.
        if not environment.get(variable.name):
            environment[variable.name] = done[variable.name] = variable.value
    environment[OWN_VARIABLES] = json.dumps(done)
    return done
