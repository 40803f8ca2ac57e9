"""What `launch.roster` may be: the run's storage, or an address of one host. Pure."""

import ipaddress
import re
from dataclasses import dataclass

IN_STORAGE = "storage"
_FORM = re.compile(r"tcp://(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?)):(?P<port>[0-9]{1,5})")
_LIKE_IPV4 = re.compile(r"[0-9.]+")
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class RosterAddress:
    """Where one host serves the roster."""

    host: str
    """A name, or an address without brackets."""

    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def literal(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The address, if `host` is no name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def read_roster_address(text: str) -> RosterAddress | None:
    """None where the roster is in storage.

    Raises: ValueError that says what is wrong with `text`.
    """
    if text == IN_STORAGE:
        return None
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("it is neither")
    host, port = match["host"] or match["ipv6"], int(match["port"])
    if not 1 <= port <= _LAST_PORT:
        raise ValueError(f"{port} is no port")
    address = RosterAddress(host, port)
    literal = address.literal
    bracketed = match["ipv6"] is not None
    if bracketed != (literal is not None and literal.version == 6) or (literal is None and _LIKE_IPV4.fullmatch(host)):
        raise ValueError(f"{host} is no address")
    if "%" in host:
        raise ValueError(f"{host} is an address on one link, whose name every host chooses for itself")
    if literal is not None and (literal.is_unspecified or literal.is_multicast):
        raise ValueError(f"{host} is not the address of one host")
    return address
