"""Which transport NCCL really chose, by its own log. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Planned = Literal["rdma", "socket"]

DEBUG, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"

_LISTENING = frozenset(("INFO", "TRACE"))

# Source: the messages of NCCL 2.4 to 2.30 in net.cc, p2p.cc and shm.cc (RCCL has the same): "Channel 00/0 : 0[0] -> 8[0]
# [send] via NET/IB/0(3)/GDRDMA(PCI)/Shared", "... via P2P/CUMEM/read", "... via SHM/direct/direct"; "Ring" in old ones.
_CHANNEL = re.compile(r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[[0-9a-f]+\])? -> \d+(?:\[[0-9a-f]+\])? .*?via (.+)")
_NET = re.compile(r"NET/([^/\n]+)/(\d+)(?:\(\d+\))?(/GDRDMA)?")
_LOCAL = re.compile(r"(P2P|SHM)\b")


@dataclass(frozen=True, slots=True)
class NcclChannels:
    """What one rank's channels use. `networks`: by NCCL's name ("IB", "Socket", a plugin's); `local`: "P2P", "SHM"."""

    networks: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    """Numbers of the network devices."""

    direct: bool | None = None
    """All network channels reach the GPU's memory without the host's (GDRDMA); None where there are none."""

    local: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the log told of any channel."""
        return bool(self.networks or self.local)


def debug_variables(path: str, *, present: Mapping[str, str]) -> dict[str, str]:
    """What to set before NCCL starts, so that it tells in a file and not on the terminal; `path` should contain `%h` and `%p`.

    NCCL writes about its channels once, and little afterwards. Nothing, where a person has set any of it.
    """
    if any(name in present for name in (DEBUG, SUBSYSTEMS, FILE)):
        return {}
    return {DEBUG: "INFO", SUBSYSTEMS: "INIT,NET", FILE: path}


def log_path(environment: Mapping[str, str], *, host: str, pid: int) -> str | None:
    """Where NCCL writes in this process; None if it writes to the terminal, or says nothing of its channels.

    Source: NCCL's `ncclDebugInit`: %h, %p and %% are replaced, and % and slashes in a host's name become dashes.
    """
    path = environment.get(FILE)
    listens = environment.get(DEBUG, "").upper() in _LISTENING
    if not path or not listens or not _covers(environment.get(SUBSYSTEMS)):
        return None
    values = {"%h": re.sub("[%/]", "-", host), "%p": str(pid), "%%": "%"}
    return re.sub("%[hp%]", lambda match: values[match[0]], path)


def parse_log(text: str) -> NcclChannels:
    """What the lines about channels say; nothing known if there are none."""
    networks, local, devices, direct = set(), set(), set(), set()
    for channel in _CHANNEL.finditer(text):
        if network := _NET.match(channel[1]):
            networks.add(network[1])
            devices.add(int(network[2]))
            direct.add(network[3] is not None)
        elif near := _LOCAL.match(channel[1]):
            local.add(near[1])
    return NcclChannels(
        networks=tuple(sorted(networks)),
        devices=tuple(sorted(devices)),
        direct=all(direct) if direct else None,
        local=tuple(sorted(local)),
    )


def kinds(networks: Iterable[str]) -> set[str]:
    """ "rdma", "socket", or a plugin's own name: NCCL's IB covers RoCE, and plugins for it are called IBext and the like."""
    return {_kind(name) for name in networks}


def _kind(name: str) -> str:
    if name.startswith("IB") or "libfabric" in name.lower():
        return "rdma"
    return "socket" if name == "Socket" else name


def _covers(subsystems: str | None) -> bool:
    """Whether channels are told of, which are part of INIT. That is in the default; a list may begin with ^ for "all but"."""
    if subsystems is None:
        return True
    listed = subsystems.upper().removeprefix("^").split(",")
    named = "INIT" in listed or "ALL" in listed
    return not named if subsystems.startswith("^") else named
