"""Which transport NCCL chose, by its own log, and whether that is the planned one. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.verdict import Reporter, Scope, Verdict

DEBUG, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"

_LISTENING = frozenset(("INFO", "TRACE"))

# Source: the messages of NCCL 2.4 to 2.30 in net.cc, p2p.cc and shm.cc (RCCL has the same): "Channel 00/0 : 0[0] -> 8[0]
# [send] via NET/IB/0(3)/GDRDMA(PCI)/Shared", "... via P2P/CUMEM/read", "... via SHM/direct/direct"; "Ring" in old ones.
_CHANNEL = re.compile(r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[[0-9a-f]+\])? -> \d+(?:\[[0-9a-f]+\])? .*?via (.+)")
_NET = re.compile(r"NET/([^/\n]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
_LOCAL = re.compile(r"(P2P|SHM)\b")


@dataclass(frozen=True, slots=True)
class NcclChannels:
    """What one rank's channels use. `networks`: by NCCL's name ("IB", "Socket", a plugin's); `local`: "P2P", "SHM".

    `direct`: all network channels reach the GPU's memory without the host's (GDRDMA); None where there are none.
    """

    networks: tuple[str, ...] = ()
    direct: bool | None = None
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
    networks, local, direct = set(), set(), set()
    for channel in _CHANNEL.finditer(text):
        if network := _NET.match(channel[1]):
            networks.add(network[1])
            direct.add(network[2] is not None)
        elif near := _LOCAL.match(channel[1]):
            local.add(near[1])
    return NcclChannels(networks=tuple(sorted(networks)), direct=all(direct) if direct else None, local=tuple(sorted(local)))


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


def judge_transport(chosen: Mapping[int, NcclChannels], members: Sequence[GroupMember]) -> list[Verdict]:
    """One verdict for each host that differs from its plan, else one for all."""
    report = Reporter("nccl_transport", scope=Scope.GROUP)
    known = [one for one in chosen.values() if one.known]
    if not known:
        remedy = "unset NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE: they are set for this where nobody has set them"
        return [report.skipped("unknown", remedy=remedy)]
    verdicts = []
    for host in dict.fromkeys(member.host for member in members):
        ranks = [member for member in members if member.host == host]
        verdict = _judge_host([chosen[one.rank] for one in ranks], ranks[0], Reporter("nccl_transport", host, Scope.GROUP))
        verdicts += [verdict] if verdict is not None else []
    return verdicts or [report.passed(", ".join(sorted({_text(one) for one in known})))]


def _judge_host(chosen: Sequence[NcclChannels], member: GroupMember, report: Reporter) -> Verdict | None:
    networks, host = {name for one in chosen for name in one.networks}, report.subject
    used = ", ".join(f"NET/{name}" for name in sorted(networks))
    if member.planned is not None and kinds(networks) & {"rdma", "socket"} - {member.planned}:
        if member.planned == "socket":
            remedy = f"set NCCL_IB_DISABLE=1 on {host} if the plan is right; else see the check infiniband"
            return report.warned(used, expected="NET/Socket", remedy=remedy)
        remedy = (
            f"on {host} see why in NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET: libibverbs must be there and /dev/infiniband "
            f"visible (in a container too), NCCL_IB_HCA name an active port, and NCCL_IB_DISABLE not be 1"
        )
        return report.warned(used, expected="NET/IB", remedy=remedy)
    if kinds(networks) == {"rdma"} and any(one.direct is False for one in chosen):
        remedy = (
            f"on {host} `modprobe nvidia_peermem` (or a kernel and driver with DMA-BUF), and look at `nvidia-smi topo -m`: GPU "
            f"and port must be below one PCIe bridge, or NCCL_NET_GDR_LEVEL=SYS"
        )
        return report.warned(f"{used} without GDRDMA", expected="NET/IB with GDRDMA", remedy=remedy)
    return None


def _text(one: NcclChannels) -> str:
    names = [f"NET/{name}" + ("/GDRDMA" if one.direct else "") for name in one.networks]
    return "+".join([*names, *one.local])
