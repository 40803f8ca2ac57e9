"""The transport plan: which variables of NCCL and gloo are set on this host, and why. Pure."""

import json
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from elastictrain.preflight.transport.facts import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    Choice,
    Facts,
    choose_interface,
)
from elastictrain.preflight.transport.infiniband import DISABLE, GID_INDEX, HCA, Rdma, RdmaPlan, decide_rdma
from elastictrain.preflight.transport.settings import OWN_VARIABLES, own_variables

FAST_GBPS = 100.0
"""From here on 4 threads with 4 sockets each. Source: NCCL's manual, "for generic 100G networks", for both variables."""

MEDIUM_GBPS = 25.0
"""From here on 4 threads with one socket each: a single one does not fill the link. Source: the numbers that NCCL takes by
itself on Google's cards."""

_TUNED_BY_NCCL = {"0x1d0f": "AWS", "0x1ae0": "Google"}
"""PCI vendors for whose cards NCCL knows the right numbers. Source: its `ncclNetSocketGetNsockNthread`."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the plan is asked for. `rdma`: what all hosts can do (`rdma.common`), None where only this host is known."""

    after_failure: bool = False
    rdma: Rdma | None = None


@dataclass(frozen=True, slots=True)
class PlannedVariable:
    """A variable, its value, and the reason for it in a few words."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransportPlan:
    """What is set on a host. `variables` are to be set; `kept` are a person's, with what would have been planned instead."""

    host: str
    variables: tuple[PlannedVariable, ...]
    kept: tuple[PlannedVariable, ...]
    interface: str | None
    """The one that the kernel uses for the peers; None is unknown, or none is fit."""
    rdma: Rdma
    hcas: tuple[str, ...]
    """DEVICE:PORT of each port that NCCL is to use."""
    link_gbps: float | None
    """Of all those ports together, or of the interface; None is unknown."""
    notes: tuple[str, ...] = ()


def decide(facts: Facts, wishes: Wishes) -> TransportPlan:
    """The plan for this host."""
    choice = choose_interface(facts)
    rdma = decide_rdma(facts.devices, settings=facts.settings, agreed=wishes.rdma)
    planned = [*_interface_variables(choice), *_rdma_variables(rdma), *_socket_variables(choice, rdma), *_debug(wishes)]
    interface = choice.interface
    notes = rdma.notes if interface is not None else (f"no interface is set: {choice.reason}", *rdma.notes)
    return TransportPlan(
        host=facts.host,
        variables=tuple(one for one in planned if one.name not in facts.settings),
        kept=tuple(_kept(facts, planned)),
        interface=interface.name if interface else None,
        rdma=rdma.kind,
        hcas=tuple(endpoint.name for endpoint in rdma.endpoints),
        link_gbps=rdma.rate_gbps if rdma.endpoints else (interface.speed_gbps if interface else None),
        notes=notes,
    )


def describe(plan: TransportPlan) -> list[str]:
    """The plan for a person, one line for each variable."""
    lines = [f"{one.name}={one.value}  # {one.reason}" for one in plan.variables]
    return [
        *lines,
        *(f"{one.name}={one.value}  # kept: {one.reason}" for one in plan.kept),
        *(f"# {one}" for one in plan.notes),
    ]


def _interface_variables(choice: Choice) -> Iterator[PlannedVariable]:
    if choice.interface is None:
        return
    name = choice.interface.name
    # Without "=" it would be a prefix: eth1 is also one of eth10.
    yield PlannedVariable(NCCL_INTERFACE, f"={name}", choice.reason)
    yield PlannedVariable(GLOO_INTERFACE, name, choice.reason)
    if choice.is_ipv6 and any(":" not in address for address in choice.interface.addresses):
        yield PlannedVariable(
            "NCCL_SOCKET_FAMILY", "AF_INET6", f"peers are reached over IPv6, and NCCL would take the IPv4 of {name}"
        )


def _rdma_variables(rdma: RdmaPlan) -> Iterator[PlannedVariable]:
    if rdma.kind is Rdma.NONE:
        yield PlannedVariable(DISABLE, "1", rdma.reason)
    if rdma.endpoints:
        yield PlannedVariable(HCA, "=" + ",".join(endpoint.name for endpoint in rdma.endpoints), rdma.reason)
    if rdma.gid_index is not None:
        yield PlannedVariable(GID_INDEX, str(rdma.gid_index), "RoCE v2 over IPv4 on each of these ports")


def _socket_variables(choice: Choice, rdma: RdmaPlan) -> Iterator[PlannedVariable]:
    speed = choice.interface.speed_gbps if choice.interface else None
    if choice.interface is None or rdma.kind is not Rdma.NONE or speed is None or speed < MEDIUM_GBPS:
        return
    if choice.interface.vendor in _TUNED_BY_NCCL:
        return
    reason = f"one socket does not fill {speed:g} Gb/s of {choice.interface.name}"
    yield PlannedVariable("NCCL_SOCKET_NTHREADS", "4", reason)
    yield PlannedVariable("NCCL_NSOCKS_PERTHREAD", "4" if speed >= FAST_GBPS else "1", reason)


def _debug(wishes: Wishes) -> Iterator[PlannedVariable]:
    if wishes.after_failure:
        reason = "the last start failed in its transport"
        yield PlannedVariable("NCCL_DEBUG", "INFO", reason)
        yield PlannedVariable("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET", reason)


def _kept(facts: Facts, planned: list[PlannedVariable]) -> Iterator[PlannedVariable]:
    for one in planned:
        if (setting := facts.settings.get(one.name)) is not None:
            same = "as planned" if setting.value == one.value else f"{one.value} was planned: {one.reason}"
            yield PlannedVariable(one.name, setting.value, f"set in {setting.origin}; {same}")


def apply(plan: TransportPlan, environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set the plan's variables, and take back those of an earlier plan; what anybody else has set stays. What was set.

    To be done before the first process group: NCCL and gloo read each variable once.
    """
    for name, value in own_variables(environment).items():
        if environment.get(name) == value:
            del environment[name]
    done: dict[str, str] = {}
    for variable in plan.variables:
        # Empty counts as not set, as it does for NCCL and gloo.
        if not environment.get(variable.name):
            environment[variable.name] = done[variable.name] = variable.value
    environment[OWN_VARIABLES] = json.dumps(done)
    return done
