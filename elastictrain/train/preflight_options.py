"""What the configuration and the transport plan say to the checks of a preflight. Pure."""

from elastictrain.config.preflight import PreflightGroup
from elastictrain.preflight.group.members import Known, Planned
from elastictrain.preflight.group.options import GroupOptions
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.plan import TransportPlan


def link_options(config: PreflightGroup) -> LinkOptions:
    """What the configuration says of the links between hosts."""
    thresholds, limits = config.thresholds, config.limits
    return LinkOptions(
        clock_warn_s=thresholds.clock_warn_s,
        clock_fail_s=thresholds.clock_fail_s,
        slow_ratio=thresholds.slow_ratio,
        late_factor=thresholds.late_factor,
        contact_s=limits.contact_s,
        stream_s=limits.stream_s,
    )


def group_options(config: PreflightGroup) -> GroupOptions:
    """What the configuration says of collectives."""
    thresholds, limits = config.thresholds, config.limits
    return GroupOptions(
        expected_ratio=thresholds.bus_ratio,
        straggler_ratio=thresholds.straggler_ratio,
        collective_s=limits.collective_s,
        bandwidth_s=limits.bandwidth_s,
        matmul_s=limits.matmul_s,
    )


def known_of(plan: TransportPlan | None) -> Known:
    """What the collectives are judged by, as far as this rank knows it."""
    if plan is None:
        return Known()
    kinds: dict[Rdma, Planned] = {Rdma.INFINIBAND: "rdma", Rdma.ROCE: "rdma", Rdma.EFA: "rdma", Rdma.NONE: "socket"}
    return Known(network_gbps=plan.link_gbps, planned=kinds.get(plan.rdma))
