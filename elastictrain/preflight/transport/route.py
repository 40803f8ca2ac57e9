"""Through which interface the kernel really sends to a peer: asked of a connected UDP socket, which sends nothing."""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastictrain.preflight.transport.interfaces import NetworkInterface, is_loopback

Probe = Callable[[str], tuple[str, str]]
"""From a name or address of a peer to its address and our own towards it, both perhaps with `%SCOPE`. Raises: OSError."""

_ANY_PORT = 9


@dataclass(frozen=True, slots=True)
class Route:
    """The way to `target` (a name or an address). Without one, `error` says why; `interface` None beside a `local`: unknown."""

    target: str
    remote: str | None = None
    local: str | None = None
    interface: str | None = None
    error: str = ""

    @property
    def is_ipv6(self) -> bool:
        """Of the address that the target led to; False where it led to none."""
        return ":" in (self.remote or "")


def find_route(target: str, *, interfaces: Sequence[NetworkInterface], probe: Probe) -> Route:
    """Ask the kernel. Takes as long as the look-up of a name takes; an address is answered at once."""
    try:
        remote, local = probe(target)
    except (OSError, UnicodeError) as error:
        return Route(target, error=getattr(error, "strerror", None) or str(error) or type(error).__name__)
    remote, local = _plain(remote), _plain(local)
    address, _, scope = local.partition("%")
    owners = [one.name for one in interfaces if address in one.addresses and scope in ("", one.name)]
    if not owners and is_loopback(address):
        # All of 127.0.0.0/8 is this host, although only 127.0.0.1 is listed.
        owners = [one.name for one in interfaces if "127.0.0.1" in one.addresses]
    return Route(target, remote.partition("%")[0], address, owners[0] if owners else None)


def ask_kernel(target: str) -> tuple[str, str]:
    """Addresses of `target` in the order of the resolver; the first one with a way to it counts."""
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as connected:
                connected.connect(address)
                return str(address[0]), _own_name(connected)
        except OSError as error:
            refused = refused or error
    raise refused or OSError(f"{target} has no address")


def _own_name(connected: socket.socket) -> str:
    own = connected.getsockname()
    address = str(own[0])
    scoped = connected.family == socket.AF_INET6 and own[3] and "%" not in address
    return f"{address}%{socket.if_indextoname(own[3])}" if scoped else address


def _plain(address: str) -> str:
    """IPv4 in the shape of IPv6 becomes IPv4 again, as interfaces list it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)
