"""What the launcher asks its host: how others reach it, and how many workers it has room for. Acts."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elastictrain.launch.cluster.gpus import visible_gpus
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.interfaces import Interface, Kind, read_interfaces, system_addresses
from elastictrain.preflight.transport.route import ask_kernel

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has (RFC 5737, RFC 3849): the way to them is the default route."""

_NOT_FOR_PEERS = (Kind.LOOPBACK, Kind.CONTAINER)
_NVIDIA_DEVICE = re.compile(r"nvidia\d+")


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


def usable_interfaces(surroundings: Surroundings) -> list[Interface]:
    """Those that may lead to other hosts."""
    return [one for one in read_interfaces(surroundings, addresses=system_addresses) if one.kind not in _NOT_FOR_PEERS]


def default_interface(surroundings: Surroundings) -> str:
    """The interface of the default route; empty if there is none. Source: proc(5), /proc/net/route."""
    for line in (surroundings.read("proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            return fields[0]
    return ""


def count_gpus(environment: Mapping[str, str], *, root: str = "/") -> int:
    """GPUs that a worker here would see, without asking any library; 0 if there are none."""
    try:
        names = os.listdir(Path(root, "dev"))  # noqa: PTH208
    except OSError:
        names = []
    found = sum(bool(_NVIDIA_DEVICE.fullmatch(name)) for name in names) or _count_amd(Path(root))
    visible = visible_gpus(environment)
    return min(found, visible[1]) if visible is not None else found


def _count_amd(root: Path) -> int:
    """Source: the kernel's amdkfd, whose nodes are CPUs, too; those have no SIMD units."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    found = 0
    for node in nodes:
        with suppress(OSError):
            match = re.search(r"^simd_count (\d+)$", node.read_text(), re.MULTILINE)
            found += match is not None and int(match[1]) > 0
    return found


def own_names() -> tuple[str, ...]:
    """How a list of hosts may call this one."""
    name = socket.gethostname()
    return tuple(dict.fromkeys((name, name.partition(".")[0])))
