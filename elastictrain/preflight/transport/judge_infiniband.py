"""Whether InfiniBand and RoCE are as they should be on this host, and alike on all. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from elastictrain.preflight.transport.facts import Facts
from elastictrain.preflight.transport.infiniband import (
    ACTIVE,
    GID_INDEX,
    HCA,
    NET,
    NO_LINK,
    RNIC,
    Device,
    Endpoint,
    LinkLayer,
    Port,
    Rdma,
    endpoints,
    kind_of,
    kinds_here,
    roce_v2_gids,
    switched_off,
)
from elastictrain.preflight.transport.patterns import NcclPattern
from elastictrain.preflight.verdict import Reporter, Status, Verdict

_verdict = Reporter("infiniband")
_ROCE_AND_INFINIBAND = (Rdma.INFINIBAND, Rdma.ROCE)


def judge_infiniband(facts: Facts) -> list[Verdict]:
    """Devices and ports, then what a person has set; one pass, or skip, where nothing is wrong."""
    found = [verdict for device in facts.devices for verdict in _device(facts, device)]
    found += [*_hca_pin(facts), *_gid_pin(facts), *_switches(facts)]
    return found or [_calm(facts)]


def judge_alike(hcas: Mapping[str, Sequence[str]], kinds: Mapping[str, frozenset[Rdma]], *, agreed: Rdma) -> list[Verdict]:
    """All hosts together, by name: whether some lack what others have, or have fewer ports of it.

    `hcas`: the ports that each plans to use; `kinds`: its `kinds_here`.
    """
    best = next((kind for kind in Rdma if any(kind in one for one in kinds.values())), Rdma.NONE)
    if best not in (Rdma.NONE, Rdma.UNKNOWN) and agreed is not best:
        lacking = [name for name, one in kinds.items() if best not in one]
        instead = "sockets" if agreed is Rdma.NONE else agreed.value
        remedy = f"ibstat; env | grep NCCL  # on {', '.join(lacking)}, or run without them: until then all hosts use {instead}"
        return [
            _verdict(
                name, Status.WARN, f"no usable {best.value} port", remedy=remedy, expected=f"{best.value}, as on the others"
            )
            for name in lacking
        ]
    most = max(map(len, hcas.values()), default=0)
    return [
        _verdict(
            name, Status.WARN, len(ports), remedy=f"ibstat  # on {name}: ports that are not Active", expected=most, unit="ports"
        )
        for name, ports in hcas.items()
        if len(ports) < most
    ]


def _device(facts: Facts, device: Device) -> Iterator[Verdict]:
    if device.is_software or device.node_type == RNIC:
        return
    active = [port for port in device.ports if port.state == ACTIVE]
    if active and device.can_be_opened is False:
        remedy = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 ...  # NCCL uses sockets without"
        yield _verdict(
            facts.host, Status.WARN, f"{device.name} is ACTIVE, but its device in /dev/infiniband is missing", remedy=remedy
        )
        return
    if not device.ports:
        remedy = f"ls /sys/class/infiniband/{device.name}/ports"
        yield _verdict(facts.host, Status.WARN, f"ports of {device.name} cannot be read", remedy=remedy)
    for port in device.ports:
        yield from _port(facts, device, port)


def _port(facts: Facts, device: Device, port: Port) -> Iterator[Verdict]:
    name = f"{device.name}:{port.number}"
    files = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
    if port.state is None:
        yield _verdict(facts.host, Status.WARN, f"state of {name} cannot be read", remedy=f"cat {files}/state")
    elif port.state != ACTIVE and port.physical_state is not None and port.physical_state not in NO_LINK:
        if port.link_layer is LinkLayer.INFINIBAND:
            remedy = f"ibstat {device.name} {port.number}; sminfo  # INIT: no subnet manager answers, start opensm on one host"
        else:
            netdev = next(iter(device.netdevs), "NETDEV")
            remedy = f"ip link set {netdev} up; ethtool {netdev}"
        measured = f"{name} is {port.state}, its link {port.physical_state}"
        yield _verdict(facts.host, Status.WARN, measured, remedy=remedy, expected=ACTIVE)
    elif port.state == ACTIVE and device.driver != "efa":
        yield from _active(facts, device, port)


def _active(facts: Facts, device: Device, port: Port) -> Iterator[Verdict]:
    name = f"{device.name}:{port.number}"
    files = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
    if port.link_layer is None:
        yield _verdict(facts.host, Status.WARN, f"link layer of {name} cannot be read", remedy=f"cat {files}/link_layer")
    elif port.link_layer is LinkLayer.ETHERNET and not port.gids_are_known:
        yield _verdict(facts.host, Status.WARN, f"GIDs of {name} cannot be read", remedy=f"ls {files}/gids")
    elif port.link_layer is LinkLayer.ETHERNET and not roce_v2_gids(port):
        netdev = next((gid.netdev for gid in port.gids if gid.netdev), next(iter(device.netdevs), "NETDEV"))
        if any(gid.ipv4 for gid in port.gids):
            remedy = f"cma_roce_mode -d {device.name} -p {port.number} -m 2  # or grep . {files}/gid_attrs/types/*"
        else:
            remedy = f"ip address add ADDRESS/PREFIX dev {netdev}  # the GID follows; or {HCA}=^={device.name} to do without"
        yield _verdict(
            facts.host, Status.WARN, f"{name} has no GID for RoCE v2 over IPv4", remedy=remedy, expected="RoCE v2 over IPv4"
        )


def _hca_pin(facts: Facts) -> Iterator[Verdict]:
    setting = facts.settings.get(HCA)
    if setting is None or switched_off(facts.settings) is not None:
        return
    said = f"{HCA}={setting.value} (set in {setting.origin})"
    good = [one.name for one in endpoints(facts.devices, {}) if kind_of(one.device, one.port) in _ROCE_AND_INFINIBAND]
    right = f"  # or set {HCA}=={','.join(good)}" if good else ""
    missing = NcclPattern.parse(setting.value).without_match([device.name for device in facts.devices])
    selected = endpoints(facts.devices, facts.settings)
    if missing:
        measured = f"{said}: there is no {', '.join(missing)}"
    elif not any(kind_of(one.device, one.port) in (*_ROCE_AND_INFINIBAND, Rdma.UNKNOWN) for one in selected):
        measured = f"{said}: no port of these is ACTIVE and can be used"
    else:
        return
    yield _verdict(facts.host, Status.FAIL, measured, remedy=setting.undo(HCA) + right, expected=", ".join(good) or None)


def _gid_pin(facts: Facts) -> Iterator[Verdict]:
    setting = facts.settings.get(GID_INDEX)
    if setting is None or setting.number < 0 or switched_off(facts.settings) is not None:
        return
    for one in endpoints(facts.devices, facts.settings):
        if kind_of(one.device, one.port) is Rdma.ROCE:
            yield from _gid_on(facts, one, setting.number)


def _gid_on(facts: Facts, endpoint: Endpoint, index: int) -> Iterator[Verdict]:
    setting = facts.settings[GID_INDEX]
    right = roce_v2_gids(endpoint.port)
    if any(gid.index == index for gid in right):
        return
    gid = next((gid for gid in endpoint.port.gids if gid.index == index), None)
    if gid is None:
        what = "is empty"
    else:
        version = "of an unknown type" if gid.roce_version is None else f"RoCE v{gid.roce_version}"
        what = f"is {version}, {gid.ipv4 or gid.address}"
    expected = f"{right[0].index} (RoCE v2, {right[0].ipv4})"
    remedy = f"{setting.undo(GID_INDEX)}  # or set {GID_INDEX}={right[0].index}"
    measured = f"{GID_INDEX}={setting.value} (set in {setting.origin}): on {endpoint.name} that GID {what}"
    # No queue pair can be made with an empty one.
    yield _verdict(facts.host, Status.WARN if gid else Status.FAIL, measured, remedy=remedy, expected=expected)


def _switches(facts: Facts) -> Iterator[Verdict]:
    usable = [one.name for one in endpoints(facts.devices, {}) if kind_of(one.device, one.port) in _ROCE_AND_INFINIBAND]
    off = switched_off(facts.settings)
    if off is not None and usable:
        name = off.partition("=")[0]
        measured = f"{off}, but ports are ACTIVE: {', '.join(usable)}"
        yield _verdict(facts.host, Status.WARN, measured, remedy=facts.settings[name].undo(name), expected="InfiniBand or RoCE")
    net = facts.settings.get(NET)
    here = kinds_here(facts.devices, settings=facts.settings)
    if net is not None and net.value.lower() == "ib" and not here & {*_ROCE_AND_INFINIBAND, Rdma.UNKNOWN}:
        measured = f"{NET}={net.value} (set in {net.origin}), but no port of InfiniBand or RoCE can be used"
        yield _verdict(facts.host, Status.FAIL, measured, remedy=net.undo(NET))


def _calm(facts: Facts) -> Verdict:
    here = kinds_here(facts.devices, settings=facts.settings)
    if here & {*_ROCE_AND_INFINIBAND}:
        names = [one.name for one in endpoints(facts.devices, facts.settings) if kind_of(one.device, one.port) in here]
        return _verdict(facts.host, Status.PASS, ", ".join(names))
    if Rdma.EFA in here:
        remedy = "NCCL_DEBUG=INFO  # its log names NET/OFI; where it says NET/Socket, install aws-ofi-nccl"
        return _verdict(facts.host, Status.SKIP, "EFA, which NCCL uses through a plugin", remedy=remedy)
    if facts.devices:
        remedy = "ibstat  # a cable, if one should be in; else nothing is to be done: sockets are used"
        return _verdict(facts.host, Status.SKIP, "devices, but no port with a link", remedy=remedy)
    return _verdict(
        facts.host, Status.SKIP, "no device", remedy="ls /sys/class/infiniband  # nothing is to be done: sockets are used"
    )
