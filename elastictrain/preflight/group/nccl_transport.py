"""Which transport NCCL chose, by its own log, and whether that is the planned one. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.verdict import Reporter, Scope, Verdict

DEBUG, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"

# Source: the messages of NCCL 2.4 to 2.30 in net.cc, p2p.cc and shm.cc (RCCL has the same): "Channel 00/0 : 0[0] -> 8[0]
# [send] via NET/IB/0(3)/GDRDMA(PCI)/Shared", "... via P2P/CUMEM/read", "... via SHM/direct/direct"; "Ring" in old ones.
_CHANNEL = re.compile(r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[[0-9a-f]+\])? -> \d+(?:\[[0-9a-f]+\])? .*?via (.+)")
_NET = re.compile(r"NET/([^/\n]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
_LOCAL = re.compile(r"(P2P|SHM)\b")
_CONNECTED = re.compile(r"NCCL INFO Connected (?:all )?(rings|trees|NVLS)\b", re.IGNORECASE)
_COUNT = re.compile(r"NCCL INFO (\d+) coll channels")


@dataclass(frozen=True, slots=True)
class NcclChannels:
    """What one rank's channels use."""

    networks: tuple[str, ...] = ()  # by NCCL's name: "IB", "Socket", or a plugin's
    direct: bool | None = None  # all network channels reach GPU memory without host memory (GDRDMA); None without any
    local: tuple[str, ...] = ()  # "P2P", "SHM"
    algorithms: tuple[str, ...] = ()  # for which it has connected: "rings", "trees", "NVLS"
    count: int = 0  # channels of collectives; 0 is unknown


def debug_variables(path: str, *, present: Mapping[str, str]) -> dict[str, str]:
    """Variables that make NCCL log to a file instead of the terminal, to set before it starts; `path` should contain `%h` and
    `%p`. NCCL logs its channels once, and little afterwards. Empty if a person has set any of the variables."""
    if any(name in present for name in (DEBUG, SUBSYSTEMS, FILE)):
        return {}
    return {DEBUG: "INFO", SUBSYSTEMS: "INIT,NET", FILE: path}


def log_path(environment: Mapping[str, str], *, host: str, pid: int) -> str | None:
    """Where NCCL logs in this process; None if it logs to the terminal, or not its channels, which are part of INIT. Source:
    NCCL's `ncclDebugInit`: %h, %p and %% are replaced, % and / in a host's name become dashes, ^ means "all but"."""
    path, subsystems = environment.get(FILE), environment.get(SUBSYSTEMS, "INIT").upper()
    named = not {"INIT", "ALL"}.isdisjoint(subsystems.removeprefix("^").split(","))
    if not path or environment.get(DEBUG, "").upper() not in ("INFO", "TRACE") or named is subsystems.startswith("^"):
        return None
    values = {"%h": re.sub("[%/]", "-", host), "%p": str(pid), "%%": "%"}
    return re.sub("%[hp%]", lambda match: values[match[0]], path)


def parse_log(text: str) -> NcclChannels:
    """The channels in a log; empty if it has none."""
    networks, local, direct = set(), set(), set()
    for channel in _CHANNEL.finditer(text):
        if network := _NET.match(channel[1]):
            networks.add(network[1])
            direct.add(network[2] is not None)
        elif near := _LOCAL.match(channel[1]):
            local.add(near[1])
    algorithms, count = tuple(sorted(set(_CONNECTED.findall(text)))), max(map(int, _COUNT.findall(text)), default=0)
    return NcclChannels(tuple(sorted(networks)), all(direct) if direct else None, tuple(sorted(local)), algorithms, count)


def kinds(networks: Collection[str]) -> set[str]:
    """ "rdma", "socket", or a plugin's own name: NCCL's IB covers RoCE, and plugins for it are called IBext and the like."""
    rdma = {name for name in networks if name.startswith("IB") or "libfabric" in name.lower()}
    return {"rdma" if name in rdma else {"Socket": "socket"}.get(name, name) for name in networks}


def judge_transport(chosen: Mapping[int, NcclChannels], members: Sequence[GroupMember]) -> list[Verdict]:
    """One verdict for each host that differs from its plan, else one for all."""
    report = Reporter("nccl_transport", scope=Scope.GROUP)
    known = [one for one in chosen.values() if one.networks or one.local]
    if not known:
        remedy = "unset NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE: they are set for this where nobody has set them"
        return [report.skipped("unknown", remedy=remedy)]
    verdicts = []
    for host in dict.fromkeys(member.host for member in members):
        ranks, on_host = [member for member in members if member.host == host], Reporter(report.check, host)
        theirs, planned = [chosen[one.rank] for one in ranks], ranks[0].planned
        networks = {name for one in theirs for name in one.networks}
        used = ", ".join(f"NET/{name}" for name in sorted(networks))
        if planned is not None and kinds(networks) & {"rdma", "socket"} - {planned}:
            remedy = f"set NCCL_IB_DISABLE=1 on {host} if the plan is right; else see the check infiniband"
            if planned == "rdma":
                needed = "libibverbs, /dev/infiniband (in a container too), an active port in NCCL_IB_HCA, no NCCL_IB_DISABLE=1"
                remedy = f"on {host} see why in NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET; it needs {needed}"
            expected = "NET/Socket" if planned == "socket" else "NET/IB"
            verdicts.append(on_host.failed(used, expected=expected, remedy=remedy))
        elif kinds(networks) == {"rdma"} and any(one.direct is False for one in theirs):
            bridge = "GPU and port must be below one PCIe bridge (`nvidia-smi topo -m`), or NCCL_NET_GDR_LEVEL=SYS"
            remedy = f"on {host} `modprobe nvidia_peermem`, or a kernel and driver with DMA-BUF; {bridge}"
            verdicts.append(on_host.failed(f"{used} without GDRDMA", expected="NET/IB with GDRDMA", remedy=remedy))
    texts = set()
    for one in known:
        names = [f"NET/{name}" + ("/GDRDMA" if one.direct else "") for name in one.networks]
        chosen_for = ", ".join([*one.algorithms, *([f"{one.count} channels"] if one.count else [])])
        texts.add("+".join([*names, *one.local]) + (f" ({chosen_for})" if chosen_for else ""))
    return verdicts or [report.passed(", ".join(sorted(texts)))]
