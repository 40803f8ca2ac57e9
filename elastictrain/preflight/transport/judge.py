"""Verdicts on the interface, and on InfiniBand and RoCE. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from elastictrain.net.interfaces import Kind, Route, is_loopback
from elastictrain.preflight.transport import infiniband
from elastictrain.preflight.transport.infiniband import Device, Port, Rdma, chosen_ports, common, kinds_here, switched_off
from elastictrain.preflight.transport.plan import GLOO_INTERFACE, NCCL_INTERFACE, TOPOLOGY, TransportFacts, choose_interface
from elastictrain.preflight.transport.settings import NcclPattern
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

RENDEZVOUS = "the rendezvous"

_ROCE_AND_INFINIBAND = {Rdma.INFINIBAND, Rdma.ROCE, Rdma.ROCE_IPV6}
_GOOGLE = "0x1ae0"  # vendor of network cards
_MANY_CARDS = 4  # from this number on they are for GPUs

_interface = Reporter("interface")
_route = Reporter("interface", scope=Scope.LINK)
_infiniband = Reporter("infiniband")


def judge_interface(facts: TransportFacts) -> list[Verdict]:
    """The routes to the peers, then a person's settings; one pass if nothing is wrong."""
    found = list(_pins(facts)) if facts.alone else [*_routes(facts), *_addresses(facts), *_pins(facts), *_idle(facts)]
    if found:
        return found
    chosen = choose_interface(facts).interface
    if chosen is None:
        remedy = f"ip -brief address  # set {NCCL_INTERFACE} and {GLOO_INTERFACE} to the interface that reaches the other hosts"
        return [_interface(facts.host, Status.SKIP, "no interface is known to reach another host", remedy=remedy)]
    return [_interface(facts.host, Status.PASS, f"{chosen.name} ({', '.join(chosen.addresses[:1])})", chosen.name)]


def _ways(facts: TransportFacts) -> list[tuple[str, Route]]:
    return [*([(RENDEZVOUS, facts.rendezvous)] if facts.rendezvous else []), *facts.peers.items()]


def _routes(facts: TransportFacts) -> Iterator[Verdict]:
    astray: dict[str, str] = {}
    for name, route in _ways(facts):
        on_link = partial(_route, f"{facts.host} -> {name}")
        interface = facts.interface(route.interface)
        if route.local is None:
            remedy = f"getent hosts {route.target}  # if it prints nothing: ADDRESS {route.target} in /etc/hosts"
            if ":" in route.target or route.target.replace(".", "").isdecimal():
                remedy = f"ip route get {route.target}; ip -brief address  # is an interface down, or without an address?"
            yield on_link(Status.FAIL, f"no way to {route.target}: {route.error}", remedy=remedy)
        elif is_loopback(route.local):
            yield _loopback(facts, name, route)
        elif interface is None:
            remedy = f"ip route get {route.remote}  # and set {NCCL_INTERFACE} and {GLOO_INTERFACE} to the device that it names"
            yield on_link(Status.WARN, f"{route.local} belongs to no interface that is seen here", remedy=remedy)
        elif interface.leads_nowhere and (route.remote != route.local or name == RENDEZVOUS):
            # Where a peer has this host's own address, the peer's own verdict says why, or `judge_addresses`.
            astray[interface.name] = f"the kernel reaches {route.remote} through {interface.name}, a {interface.kind}"
    for device, measured in astray.items():
        remedy = f"ip route  # on {facts.host}: give {device} a network that no other host is in (Docker: `bip`), or remove it"
        yield _interface(facts.host, Status.FAIL, measured, remedy=remedy)
    passable = {one.name for one in facts.interfaces if not one.leads_nowhere}
    used = sorted({route.interface for route in facts.peers.values() if route.interface in passable and route.interface})
    if len(used) > 1:
        chosen = choose_interface(facts).interface
        remedy = f"give all hosts an address in one network; or set {NCCL_INTERFACE}==NAME to the one that reaches every host"
        expected = f"one, {chosen.name if chosen else used[0]}"
        yield _interface(facts.host, Status.WARN, f"peers are reached through {' and '.join(used)}", expected, remedy)


def _loopback(facts: TransportFacts, name: str, route: Route) -> Verdict:
    target = "" if route.target == route.remote else f"{route.target} is "
    measured = f"{target}{route.remote}, which is loopback: every host reaches itself there"
    if name == RENDEZVOUS:
        remedy = "--rdzv-endpoint=ADDRESS:PORT (or --master-addr) with the address by which other hosts reach the store's host"
        return _route(f"{facts.host} -> {name}", Status.FAIL, measured, remedy=remedy)
    remedy = f"on {name}: torchrun --local-addr ADDRESS, or its address, not {route.remote}, beside its name in /etc/hosts"
    return _interface(name, Status.FAIL, measured, remedy=remedy)


def judge_addresses(places: Mapping[str, tuple[str, str]]) -> list[Verdict]:
    """`places`: by host, its address and its machine. Machines that share an address are unfit: any may get what is sent."""
    sharing: dict[str, list[str]] = defaultdict(list)
    for host, (address, _) in places.items():
        sharing[address].append(host)
    found = []
    for address, hosts in sharing.items():
        if len({places[host][1] for host in hosts}) > 1:
            remedy = f"ip -brief address  # on {', '.join(hosts)}: give each an address of its own"
            measured, expected = f"{address}, as {len(hosts) - 1} more", "an address of its own"
            found += [_interface(host, Status.FAIL, measured, expected, remedy) for host in hosts]
    return found


def _addresses(facts: TransportFacts) -> Iterator[Verdict]:
    """NCCL and gloo listen at an interface's first address, which need not be the one that the kernel sends from."""
    chosen = choose_interface(facts).interface
    for name, route in _ways(facts):
        if chosen is None or route.interface != chosen.name or route.local is None:
            continue
        first = next((one for one in chosen.addresses if (":" in one) == route.is_ipv6), None)
        if first is not None and first != route.local:
            measured = f"{chosen.name} listens at {first}, its first address, but {name} knows it by {route.local}"
            remedy = f"ip address delete {first}/PREFIX dev {chosen.name}  # and add it again: it is then behind {route.local}"
            yield _interface(facts.host, Status.WARN, measured, route.local, remedy)
            return


def _idle(facts: TransportFacts) -> Iterator[Verdict]:
    """A faster card than the one by which the hosts meet."""
    chosen, used = choose_interface(facts).interface, kinds_here(facts.ports, settings=facts.settings)
    if chosen is None or chosen.speed_gbps is None or NCCL_INTERFACE in facts.settings or used:
        return
    cards = [one for one in facts.interfaces if one.kind is Kind.CARD and one.running and one.addresses]
    best = max(cards, key=lambda one: one.speed_gbps or 0.0, default=chosen)
    if (best.speed_gbps or 0.0) >= 2 * chosen.speed_gbps:
        measured = f"{chosen.name} with {chosen.speed_gbps:g} Gb/s; {best.name} with {best.speed_gbps:g} Gb/s idles"
        remedy = f"if {best.name} reaches all hosts, start with its addresses: --rdzv-endpoint, --local-addr, launch.address"
        yield _interface(facts.host, Status.WARN, measured, best.name, remedy)


def _pins(facts: TransportFacts) -> Iterator[Verdict]:
    """The interfaces that a person has set for NCCL and gloo."""
    chosen = choose_interface(facts).interface
    for variable, sign in ((NCCL_INTERFACE, "="), (GLOO_INTERFACE, "")):
        setting = facts.settings.get(variable)
        # NCCL and gloo ignore a value of one letter.
        if setting is None or len(setting.value) < 2 or not facts.interfaces:
            continue
        remedy = setting.undo(variable) + (f"  # or set {variable}={sign}{chosen.name}" if chosen else "")
        if variable == NCCL_INTERFACE:
            # The first one, in the order of the interfaces, is for bootstrap.
            pattern = NcclPattern.parse(setting.value)
            pinned = [one for one in facts.interfaces if pattern.matches(one.name) and one.can_carry]
            wrong = [f"there is no {name}" for name in pattern.without_match([one.name for one in facts.interfaces])]
            wrong += [] if pinned or wrong else ["no interface that is running and has an address is among them"]
        else:
            # gloo takes whole names in a comma list, ignores a last empty one, and takes none if one of them is wrong.
            named = {name: facts.interface(name) for name in setting.value.removesuffix(",").split(",")}
            pinned = [one for one in named.values() if one is not None]
            wrong = [f"there is no {name!r}" for name, one in named.items() if one is None]
            wrong += [f"{one.name} has no address" for one in pinned if not one.addresses]
        # A single host can use any interface.
        useful = [] if facts.alone else pinned
        wrong += [f"{one.name} is a {one.kind}, behind which no other host is" for one in useful if one.leads_nowhere]
        wrong += [f"{one.name} is down" for one in useful if one.running is False and not one.leads_nowhere]
        said, expected = f"{variable}={setting.value} (set in {setting.origin})", chosen.name if chosen else None
        if wrong:
            yield _interface(facts.host, Status.FAIL, f"{said}: {'; '.join(wrong)}", expected, remedy)
        elif useful and chosen is not None and useful[0].name != chosen.name:
            # Another interface than the kernel's can be right: a second network only for training.
            measured = f"{said}: {useful[0].name} comes first, but the kernel reaches the others through {chosen.name}"
            yield _interface(facts.host, Status.WARN, measured, chosen.name, remedy)


def judge_infiniband(facts: TransportFacts) -> list[Verdict]:
    """Devices and ports, then a person's settings; one pass, or skip, if nothing is wrong."""
    report = Reporter("infiniband", facts.host)
    found = [verdict for device, ports in facts.devices.items() for verdict in _device(facts.host, device, ports)]
    found += [*_hca_pin(facts), *_gid_pin(facts), *_switches(facts), *_lacking(facts)]
    if found:
        return found
    here = kinds_here(facts.ports, settings=facts.settings)
    if here & _ROCE_AND_INFINIBAND:
        names = [port.name for port in chosen_ports(facts.ports, facts.settings) if port.kind in here]
        return [report.passed(", ".join(names))]
    if Rdma.EFA in here:
        return [report.passed(f"EFA through {', '.join(facts.plugins)}")]
    if facts.devices:
        remedy = "ibstat  # a cable, if one should be in; else nothing is to be done: sockets are used"
        return [report.skipped("devices, but no port with a link", remedy=remedy)]
    return [report.skipped("no device", remedy="ls /sys/class/infiniband  # nothing is to be done: sockets are used")]


def judge_alike(hcas: Mapping[str, Sequence[str]], kinds: Mapping[str, frozenset[Rdma]]) -> list[Verdict]:
    """All hosts by name: those that lack ports of others. `hcas`: ports that each plans to use; `kinds`: its `kinds_here`."""
    best, agreed = next((kind for kind in Rdma if any(kind in one for one in kinds.values())), Rdma.NONE), common(kinds)
    if best not in (Rdma.NONE, Rdma.UNKNOWN) and agreed is not best:
        lacking = [name for name, one in kinds.items() if best not in one]
        instead = "sockets" if agreed is Rdma.NONE else agreed.value
        remedy = f"ibstat; env | grep NCCL  # on {', '.join(lacking)}, or run without them"
        without = f"preflight.checks.infiniband=warn goes on: all hosts then use {instead}"
        measured, expected = f"no usable {best.value} port", f"{best.value}, as on the others"
        # Where most lack it, those that have it are the exception, and sockets are right.
        status = Status.FAIL if agreed is Rdma.NONE and 2 * len(lacking) <= len(kinds) else Status.WARN
        return [_infiniband(name, status, measured, expected, f"{remedy} ({without})") for name in lacking]
    most, remedy = max(map(len, hcas.values()), default=0), "ibstat  # on this host: ports that are not Active"
    fewer = [name for name, ports in hcas.items() if len(ports) < most]
    return [_infiniband(name, Status.WARN, len(hcas[name]), most, remedy, unit="ports") for name in fewer]


def _device(host: str, device: Device, ports: Sequence[Port]) -> Iterator[Verdict]:
    if device.is_software or device.node_type == "RNIC":
        return
    warn = partial(_infiniband, host, Status.WARN)
    if device.can_be_opened is False and any(port.state == infiniband.ACTIVE for port in ports):
        remedy = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 ...  # NCCL uses sockets without"
        yield warn(f"{device.name} is ACTIVE, but its device in /dev/infiniband is missing", remedy=remedy)
        return
    if not ports:
        remedy = f"ls /sys/class/infiniband/{device.name}/ports"
        yield warn(f"ports of {device.name} cannot be read", remedy=remedy)
    yield from filter(None, (_port_problem(port, warn) for port in ports))


def _port_problem(port: Port, warn: Callable[..., Verdict]) -> Verdict | None:
    device, name = port.device, port.name
    files, netdev = f"/sys/class/infiniband/{device.name}/ports/{port.number}", next(iter(device.netdevs), "NETDEV")
    if port.state is None:
        return warn(f"state of {name} cannot be read", remedy=f"cat {files}/state")
    if port.state != infiniband.ACTIVE:
        if port.physical_state in (None, "Polling", "Disabled", "Sleep"):
            # Nothing is at the other end of the cable.
            return None
        remedy = f"ip link set {netdev} up; ethtool {netdev}"
        if port.link_layer == infiniband.INFINIBAND:
            remedy = f"ibstat {device.name} {port.number}; sminfo  # INIT: no subnet manager answers, start opensm on one host"
        return warn(f"{name} is {port.state}, its link {port.physical_state}", infiniband.ACTIVE, remedy)
    if device.driver == "efa":
        return None
    if port.link_layer is None:
        return warn(f"link layer of {name} cannot be read", remedy=f"cat {files}/link_layer")
    if port.link_layer != infiniband.ETHERNET or port.roce_v2_gids() or device.is_enslaved:
        return None
    if not port.gids_are_known:
        return warn(f"GIDs of {name} cannot be read", remedy=f"ls {files}/gids")
    owner = next((gid.netdev for gid in port.gids if gid.netdev), netdev)
    remedy = f"ip address add ADDRESS/PREFIX dev {owner}  # the GID follows; or {infiniband.HCA}=^={device.name} to do without"
    if any(gid.ipv4 for gid in port.gids):
        remedy = f"cma_roce_mode -d {device.name} -p {port.number} -m 2  # or grep . {files}/gid_attrs/types/*"
    return warn(f"{name} has no GID for RoCE v2 over IPv4", "RoCE v2 over IPv4", remedy)


def _hca_pin(facts: TransportFacts) -> Iterator[Verdict]:
    setting = facts.settings.get(infiniband.HCA)
    if setting is None or switched_off(facts.settings) is not None:
        return
    good = [port.name for port in facts.ports if port.kind in _ROCE_AND_INFINIBAND]
    right = f"  # or set {infiniband.HCA}=={','.join(good)}" if good else ""
    missing = NcclPattern.parse(setting.value).without_match([device.name for device in facts.devices])
    selected = {port.kind for port in chosen_ports(facts.ports, facts.settings)}
    if missing:
        problem = f"there is no {', '.join(missing)}"
    elif not selected & {*_ROCE_AND_INFINIBAND, Rdma.UNKNOWN}:
        problem = "no port of these is ACTIVE and can be used"
    else:
        return
    measured = f"{infiniband.HCA}={setting.value} (set in {setting.origin}): {problem}"
    yield _infiniband(facts.host, Status.FAIL, measured, ", ".join(good), setting.undo(infiniband.HCA) + right)


def _gid_pin(facts: TransportFacts) -> Iterator[Verdict]:
    setting = facts.settings.get(infiniband.GID_INDEX)
    if setting is None or setting.number < 0 or switched_off(facts.settings) is not None:
        return
    for port in chosen_ports(facts.ports, facts.settings):
        right = port.roce_v2_gids()
        if port.kind not in (Rdma.ROCE, Rdma.ROCE_IPV6) or any(gid.index == setting.number for gid in right):
            continue
        gid = next((gid for gid in port.gids if gid.index == setting.number), None)
        what = "is empty"
        if gid is not None:
            version = "of an unknown type" if gid.roce_version is None else f"RoCE v{gid.roce_version}"
            what = f"is {version}, {gid.ipv4 or gid.address}"
        expected = f"{right[0].index} (RoCE v2, {right[0].ipv4 or right[0].address})"
        remedy = f"{setting.undo(infiniband.GID_INDEX)}  # or set {infiniband.GID_INDEX}={right[0].index}"
        measured = f"{infiniband.GID_INDEX}={setting.value} (set in {setting.origin}): on {port.name} that GID {what}"
        # NCCL cannot make a queue pair with an empty GID.
        yield _infiniband(facts.host, Status.WARN if gid else Status.FAIL, measured, expected, remedy)


def _switches(facts: TransportFacts) -> Iterator[Verdict]:
    usable = [port.name for port in facts.ports if port.kind in _ROCE_AND_INFINIBAND]
    off = switched_off(facts.settings)
    if off is not None and usable:
        name = off.partition("=")[0]
        measured = f"{off}, but ports are ACTIVE: {', '.join(usable)}"
        yield _infiniband(facts.host, Status.WARN, measured, "InfiniBand or RoCE", facts.settings[name].undo(name))
    net = facts.settings.get(infiniband.NET)
    here = kinds_here(facts.ports, settings=facts.settings)
    if net is not None and net.value.lower() == "ib" and not here & {*_ROCE_AND_INFINIBAND, Rdma.UNKNOWN}:
        measured = f"{infiniband.NET}={net.value} (set in {net.origin}), but no port of InfiniBand or RoCE can be used"
        yield _infiniband(facts.host, Status.FAIL, measured, remedy=net.undo(infiniband.NET))


def _lacking(facts: TransportFacts) -> Iterator[Verdict]:
    """What clouds have beside their devices: plugins, and the topology that a virtual machine hides."""
    usable = [port for port in facts.ports if port.kind in _ROCE_AND_INFINIBAND]
    efa = Rdma.EFA in kinds_here(facts.ports, settings=facts.settings)
    google = [one.name for one in facts.interfaces if one.vendor == _GOOGLE]
    pinned = facts.plugins or "NCCL_NET_PLUGIN" in facts.settings
    if not pinned and not usable and (efa or len(google) > _MANY_CARDS):
        remedy = "install aws-ofi-nccl" if efa else "mount the machine's plugin (TCPXO or TCPX)"
        expected = f"libnccl-net*.so, for {'EFA' if efa else f'{len(google)} network cards'}"
        yield _infiniband(facts.host, Status.WARN, "no plugin of NCCL", expected, f"{remedy}; its folder in LD_LIBRARY_PATH")
    if facts.lacks_topology:
        setting = facts.settings[TOPOLOGY]
        measured = f"{TOPOLOGY}={setting.value} (set in {setting.origin}): there is no such file"
        yield _infiniband(facts.host, Status.WARN, measured, remedy=setting.undo(TOPOLOGY))
    elif facts.vendor.startswith("Microsoft") and len(usable) >= _MANY_CARDS and TOPOLOGY not in facts.settings:
        remedy = f"export {TOPOLOGY}=/opt/microsoft/ndv5-topo.xml  # or the file there for this kind of machine"
        yield _infiniband(facts.host, Status.WARN, f"{TOPOLOGY} is not set", "the topology that the machine hides", remedy)
