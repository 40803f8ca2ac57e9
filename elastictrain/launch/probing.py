"""What the launcher asks its host: its names, its default route, and how many workers it has room for. Acts."""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elastictrain.launch.cluster.gpus import visible_gpus
from elastictrain.preflight.surroundings import Surroundings

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
