"""Whether this host speaks to the others through the right interface. Pure."""

from collections.abc import Iterator

from elastictrain.preflight.transport.facts import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    Facts,
    choose_interface,
    pinned_for_gloo,
    pinned_for_nccl,
)
from elastictrain.preflight.transport.interfaces import NetworkInterface, Route, is_loopback
from elastictrain.preflight.transport.patterns import NcclPattern
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

RENDEZVOUS = "the rendezvous"

_verdict = Reporter("interface")


def judge_interface(facts: Facts) -> list[Verdict]:
    """The ways to the peers, then what a person has set; one pass where nothing is wrong."""
    found = [*_routes(facts), *_addresses(facts), *_nccl_pin(facts), *_gloo_pin(facts)]
    if found:
        return found
    choice = choose_interface(facts)
    if choice.interface is None:
        remedy = f"ip -brief address  # set {NCCL_INTERFACE} and {GLOO_INTERFACE} to the interface that reaches the other hosts"
        return [_verdict(facts.host, Status.SKIP, measured="no interface is known to reach another host", remedy=remedy)]
    measured = f"{choice.interface.name} ({', '.join(choice.interface.addresses[:1])})"
    return [_verdict(facts.host, Status.PASS, measured=measured, expected=choice.interface.name)]


def _routes(facts: Facts) -> Iterator[Verdict]:
    if facts.alone:
        return
    ways = [(RENDEZVOUS, facts.rendezvous), *facts.peers.items()]
    for name, route in ways:
        if route is None:
            continue
        link = f"{facts.host} -> {name}"
        interface = facts.interface(route.interface)
        if route.local is None:
            yield _verdict(
                link, Status.FAIL, f"no way to {route.target}: {route.error}", remedy=_lost_remedy(route), scope=Scope.LINK
            )
        elif interface is None and not is_loopback(route.local):
            remedy = f"ip route get {route.remote}  # and set {NCCL_INTERFACE} and {GLOO_INTERFACE} to the device that it names"
            yield _verdict(
                link, Status.WARN, f"{route.local} belongs to no interface that is seen here", remedy=remedy, scope=Scope.LINK
            )
        elif interface is None or interface.leads_nowhere:
            yield _verdict(
                link, Status.FAIL, _nowhere(interface, route), remedy=_nowhere_remedy(name, interface, route), scope=Scope.LINK
            )
    used = sorted({route.interface for route in facts.peers.values() if route.interface and not _is_bad(facts, route)})
    if len(used) > 1:
        choice = choose_interface(facts)
        name = choice.interface.name if choice.interface else used[0]
        remedy = f"give all hosts an address in one network; or set {NCCL_INTERFACE}==NAME to the one that reaches every host"
        measured = f"peers are reached through {' and '.join(used)}"
        yield _verdict(facts.host, Status.WARN, measured=measured, expected=f"one, {name}", remedy=remedy)


def _addresses(facts: Facts) -> Iterator[Verdict]:
    """NCCL and gloo listen at the first address of an interface, which need not be the one that the kernel sends from."""
    interface = choose_interface(facts).interface
    if interface is None or facts.alone:
        return
    for name, route in ((RENDEZVOUS, facts.rendezvous), *facts.peers.items()):
        if route is None or route.interface != interface.name or route.local is None:
            continue
        first = next((one for one in interface.addresses if (":" in one) == route.is_ipv6), None)
        if first is not None and first != route.local:
            measured = f"{interface.name} listens at {first}, its first address, but {name} knows it by {route.local}"
            remedy = (
                f"ip address delete {first}/PREFIX dev {interface.name}  # and add it again: it is then behind {route.local}"
            )
            yield _verdict(facts.host, Status.WARN, measured=measured, expected=route.local, remedy=remedy)
            return


def _nccl_pin(facts: Facts) -> Iterator[Verdict]:
    pinned = pinned_for_nccl(facts)
    if pinned is None or not facts.interfaces:
        return
    setting = facts.settings[NCCL_INTERFACE]
    said = f"{NCCL_INTERFACE}={setting.value} (set in {setting.origin})"
    kernel = choose_interface(facts).interface
    remedy = _pin_remedy(facts, NCCL_INTERFACE, f"={kernel.name}" if kernel else None)
    missing = NcclPattern.parse(setting.value).without_match([one.name for one in facts.interfaces])
    if not pinned:
        names = (
            f"there is no {', '.join(missing)}" if missing else "no interface that is running and has an address is among them"
        )
        yield _verdict(facts.host, Status.FAIL, measured=f"{said}: {names}", expected=_expected(kernel), remedy=remedy)
        return
    if missing:
        measured = f"{said}: there is no {', '.join(missing)}"
        yield _verdict(facts.host, Status.FAIL, measured=measured, expected=_expected(kernel), remedy=remedy)
    yield from _pinned(facts, said, pinned, kernel, remedy)


def _gloo_pin(facts: Facts) -> Iterator[Verdict]:
    pinned = pinned_for_gloo(facts)
    if pinned is None or not facts.interfaces:
        return
    setting = facts.settings[GLOO_INTERFACE]
    said = f"{GLOO_INTERFACE}={setting.value} (set in {setting.origin})"
    kernel = choose_interface(facts).interface
    remedy = _pin_remedy(facts, GLOO_INTERFACE, kernel.name if kernel else None)
    missing = [repr(name) for name, one in pinned.items() if one is None]
    silent = [name for name, one in pinned.items() if one is not None and not one.addresses]
    if missing or silent:
        what = f"there is no {', '.join(missing)}" if missing else f"{', '.join(silent)} has no address"
        yield _verdict(facts.host, Status.FAIL, measured=f"{said}: {what}", expected=_expected(kernel), remedy=remedy)
        return
    yield from _pinned(facts, said, [one for one in pinned.values() if one is not None], kernel, remedy)


def _pinned(
    facts: Facts, said: str, pinned: list[NetworkInterface], kernel: NetworkInterface | None, remedy: str
) -> Iterator[Verdict]:
    """Interfaces that exist. Another one than the kernel's can be right: a second network for the training alone."""
    if facts.alone:
        return
    nowhere = [one for one in pinned if one.leads_nowhere]
    down = [one for one in pinned if one.running is False]
    if nowhere or down:
        words = [f"{one.name} is a {one.kind}, behind which no other host is" for one in nowhere]
        words += [f"{one.name} is down" for one in down if one not in nowhere]
        yield _verdict(
            facts.host, Status.FAIL, measured=f"{said}: {'; '.join(words)}", expected=_expected(kernel), remedy=remedy
        )
    elif kernel is not None and pinned[0].name != kernel.name:
        measured = f"{said}: {pinned[0].name} comes first, but the kernel reaches the others through {kernel.name}"
        yield _verdict(facts.host, Status.WARN, measured=measured, expected=kernel.name, remedy=remedy)


def _is_bad(facts: Facts, route: Route) -> bool:
    interface = facts.interface(route.interface)
    return interface is None or interface.leads_nowhere


def _nowhere(interface: NetworkInterface | None, route: Route) -> str:
    if interface is None or is_loopback(route.local or ""):
        name = "" if route.target == route.remote else f"{route.target} is "
        return f"{name}{route.remote}, which is loopback: every host reaches itself there"
    text = f"the kernel reaches {route.remote} through {interface.name}, a {interface.kind}"
    return f"{text}: it is this host's own address" if route.remote == route.local else text


def _nowhere_remedy(name: str, interface: NetworkInterface | None, route: Route) -> str:
    if interface is None or is_loopback(route.local or ""):
        if name == RENDEZVOUS:
            return (
                "--rdzv-endpoint=ADDRESS:PORT (or --master-addr) with the address by which other hosts reach the store's host"
            )
        return f"on {name}: torchrun --local-addr ADDRESS, or its address, not {route.remote}, beside its name in /etc/hosts"
    return f"ip route get {route.remote}  # then give {name} an address outside the network of {interface.name}"


def _lost_remedy(route: Route) -> str:
    if _is_address(route.target):
        return f"ip route get {route.target}  # and: ip -brief address, for an interface that is down or has no address"
    return f"getent hosts {route.target}  # if it prints nothing: ADDRESS {route.target} in /etc/hosts"


def _is_address(text: str) -> bool:
    return ":" in text or text.replace(".", "").isdecimal()


def _pin_remedy(facts: Facts, name: str, right: str | None) -> str:
    undo = facts.settings[name].undo(name)
    return f"{undo}  # or set {name}={right}" if right else undo


def _expected(kernel: NetworkInterface | None) -> str | None:
    return kernel.name if kernel else None
