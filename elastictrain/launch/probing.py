"""What the launcher asks its host: its names, its default route, and how many workers it has room for. Acts."""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from elastictrain.launch.cluster.place import visible_gpus
from elastictrain.preflight.surroundings import Surroundings


def next_address(before: str, *, own: Collection[str], found: str) -> str:
    """What to tell the others from now on. Pure. `own` are this host's addresses now, `found` is the one that would be chosen.

    An address stays as long as the host has it, whichever route is the default one meanwhile: a change costs a restart. A host
    that is not connected for a while keeps the address that it had.
    """
    if before in own or found == before or _is_loopback(found):
        return before
    return found


class OwnAddress:
    """This host's address, looked at again each time. Where an operator or the cluster has set one, it stays."""

    def __init__(self, first: str, *, own: Callable[[], Collection[str]], find: Callable[[], str]) -> None:
        """`own`: this host's addresses; `find`: the one that others may reach. A `first` that is none of its own was set."""
        self._address = first
        self._own = own
        self._find = find
        self._is_set = first not in own()
        self._missing = False

    def look(self) -> str:
        """The address now; asks the kernel, and looks up names of peers."""
        own = self._own()
        missing = not self._is_set and self._address not in own
        # Not at the first look: an interface that is set up anew has no address for a moment.
        if missing and self._missing:
            self._address = next_address(self._address, own=own, found=self._find())
        self._missing = missing
        return self._address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


_NVIDIA_DEVICE = re.compile(r"nvidia\d+")


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
