"""How other hosts reach this one. Acts."""

from collections.abc import Sequence
from contextlib import suppress

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.interfaces import Kind, NetworkInterface, read_interfaces, system_addresses
from elastictrain.preflight.transport.route import ask_kernel

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has (RFC 5737, RFC 3849): the way to them is the default route."""

_NOT_FOR_PEERS = (Kind.LOOPBACK, Kind.CONTAINER)


def own_address(peers: Sequence[str], *, surroundings: Surroundings) -> str:
    """The address from which the kernel sends to the others, or by the default route; else any that others may reach."""
    for target in (*peers, *_ELSEWHERE):
        with suppress(OSError, UnicodeError):
            _, local = ask_kernel(target)
            if not local.startswith("127.") and local != "::1":
                return local
    for interface in usable_interfaces(surroundings):
        if interface.addresses:
            return interface.addresses[0]
    return _LOOPBACK


def usable_interfaces(surroundings: Surroundings) -> list[NetworkInterface]:
    """Those that may lead to other hosts."""
    return [one for one in read_interfaces(surroundings, addresses=system_addresses) if one.kind not in _NOT_FOR_PEERS]
