"""What a person has set for NCCL (RCCL reads the same) and gloo, and where; what we set ourselves is told apart."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.interfaces import Kind, NetworkInterface, ask_kernel, read_interfaces, system_addresses

OWN_VARIABLES = "ELASTICTRAIN_TRANSPORT"
"""Names and values that a plan has set, as JSON. Processes inherit them: the next plan must not take them for a person's."""

IN_ENVIRONMENT = "the environment"
_SYSTEM_FILE = "/etc/nccl.conf"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and where it is set: `IN_ENVIRONMENT`, or a file."""

    value: str
    origin: str = IN_ENVIRONMENT

    @property
    def number(self) -> int:
        """As NCCL reads it: the number in front, also in hexadecimal, or 0."""
        match = re.match(r"\s*([+-]?)(0x[0-9a-f]{1,16}|\d{1,18})", self.value, re.ASCII | re.IGNORECASE)
        if match is None:
            return 0
        size = int(match[2], 16 if match[2][:2].lower() == "0x" else 10)
        return -size if match[1] == "-" else size

    def undo(self, name: str) -> str:
        """What to do to be rid of it."""
        return f"unset {name}" if self.origin == IN_ENVIRONMENT else f"remove {name} from {self.origin}"


def read_settings(surroundings: Surroundings) -> dict[str, Setting]:
    """A person's settings by name, empty ones left out. The first place that has a name wins.

    Source: NCCL's `initEnv`: the environment, then $NCCL_CONF_FILE or else ~/.nccl.conf, then /etc/nccl.conf.
    """
    environment = surroundings.environment
    own = own_variables(environment)
    found = {
        name: Setting(value)
        for name, value in environment.items()
        if name.startswith(("NCCL_", "GLOO_")) and value and own.get(name) != value
    }
    home = environment.get("HOME", "")
    personal = environment.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    for path in (personal, _SYSTEM_FILE):
        for name, value in _lines(surroundings.read(path) if path else None):
            if value and name.startswith("NCCL_"):
                found.setdefault(name, Setting(value, path))
    return found


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What an earlier plan has set, in this process or one of its ancestors."""
    try:
        record = json.loads(environment.get(OWN_VARIABLES, "{}"))
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: value for name, value in record.items() if isinstance(value, str)}


def _lines(text: str | None) -> list[tuple[str, str]]:
    lines = [line for line in (text or "").splitlines() if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


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
