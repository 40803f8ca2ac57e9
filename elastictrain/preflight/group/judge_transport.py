"""Whether NCCL uses what was planned. Pure."""

from collections.abc import Callable, Mapping, Sequence

from elastictrain.preflight.group.chosen import NcclChannels, Planned, kinds
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.verdict import Scope, Status, Verdict

_CHECK = "nccl_transport"


def judge_transport(chosen: Mapping[int, NcclChannels], members: Sequence[GroupMember], *, seconds: float) -> list[Verdict]:
    """One verdict for each host that differs from its plan, else one for all."""
    if not any(one.known for one in chosen.values()):
        return [_unread(seconds)]
    verdicts = []
    for host in dict.fromkeys(member.host for member in members):
        ranks = [member for member in members if member.host == host]
        networks = {name for one in ranks for name in chosen[one.rank].networks}
        if not networks:
            continue
        verdicts += _of_host(host, ranks, chosen, networks, seconds)
    used = sorted({_text(one) for one in chosen.values() if one.known})
    passed = Verdict(
        check=_CHECK, scope=Scope.GROUP, subject="all", status=Status.PASS, measured=", ".join(used), seconds=seconds
    )
    return verdicts or [passed]


def _of_host(
    host: str, ranks: Sequence[GroupMember], chosen: Mapping[int, NcclChannels], networks: set[str], seconds: float
) -> list[Verdict]:
    def warn(measured: str, expected: str, remedy: str) -> list[Verdict]:
        return [
            Verdict(
                check=_CHECK,
                scope=Scope.GROUP,
                subject=host,
                status=Status.WARN,
                measured=measured,
                expected=expected,
                remedy=remedy,
                seconds=seconds,
            )
        ]

    planned = ranks[0].planned
    used = ", ".join(f"NET/{name}" for name in sorted(networks))
    if planned is not None and kinds(networks) & {"rdma", "socket"} - {planned}:
        return _off_plan(planned, host, used, warn)
    if kinds(networks) == {"rdma"} and any(chosen[one.rank].direct is False for one in ranks):
        remedy = (
            f"on {host} `modprobe nvidia_peermem` (or a kernel and driver with DMA-BUF), and look at `nvidia-smi topo -m`: GPU "
            f"and port must be below one PCIe bridge, or NCCL_NET_GDR_LEVEL=SYS"
        )
        return warn(f"{used} without GDRDMA", "NET/IB with GDRDMA", remedy)
    return []


def _off_plan(planned: Planned, host: str, used: str, warn: Callable[[str, str, str], list[Verdict]]) -> list[Verdict]:
    if planned == "rdma":
        remedy = (
            f"on {host} see why in NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET: libibverbs must be there and /dev/infiniband "
            f"visible (in a container too), NCCL_IB_HCA name an active port, and NCCL_IB_DISABLE not be 1"
        )
        return warn(used, "NET/IB", remedy)
    return warn(used, "NET/Socket", f"set NCCL_IB_DISABLE=1 on {host} if the plan is right; else see the check infiniband")


def _unread(seconds: float) -> Verdict:
    return Verdict(
        check=_CHECK,
        scope=Scope.GROUP,
        subject="all",
        status=Status.SKIP,
        measured="unknown",
        seconds=seconds,
        remedy="unset NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE: they are set for this where nobody has set them",
    )


def _text(one: NcclChannels) -> str:
    names = [f"NET/{name}" + ("/GDRDMA" if one.direct else "") for name in one.networks]
    return "+".join([*names, *one.local])
