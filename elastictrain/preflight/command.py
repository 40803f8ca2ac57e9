"""The command under torchrun: all hosts of the group, and their links; one rank shows what all found."""

import argparse
import os
import sys

import torch.distributed as dist

from elastictrain.config.preflight import PreflightGroup
from elastictrain.distributed.device import Backend, find_backend
from elastictrain.distributed.generation import Introduction, agree, check_alike
from elastictrain.distributed.group import connect, leave, make_group
from elastictrain.distributed.store import BoundedStore, StoreExchange
from elastictrain.errors import TransportError
from elastictrain.identity import Identity, read_identity
from elastictrain.preflight.group.checks import GroupChecks, GroupFindings, Request
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostLayout, HostPreflight, PreflightRequest, find_layout
from elastictrain.preflight.policy import Level, apply_modes, decide
from elastictrain.preflight.verdict import show

_RENDEZVOUS_S = 60.0
_GROUP_S = 60.0


def check_group(parsed: argparse.Namespace) -> int:
    """What every rank of torchrun does; returns its exit code. Collective: yes. Raises: ElasticTrainError."""
    identity = read_identity(os.environ)
    backend, _ = find_backend("auto", environment=os.environ, local_world_size=identity.local_world_size)
    store = BoundedStore(lambda: connect(identity, timeout_s=_RENDEZVOUS_S), limit_s=_RENDEZVOUS_S)
    introduction = Introduction(identity.host, identity.local_world_size, backend, digest="")
    generation = agree(store, identity, introduction, number=0, timeout_s=store.left_s, tell=_tell)
    check_alike(generation)
    shared = dist.PrefixStore(f"elastictrain/{generation.name}/preflight", store.unbounded)
    ranks = [(one.host, one.local_world_size) for one in generation.ranks]
    rendezvous = os.environ.get("MASTER_ADDR")
    layout = find_layout(ranks, rank=identity.rank, local_rank=identity.local_rank, rendezvous=rendezvous)
    exchange, asked = store.ask(lambda: StoreExchange(shared)), _asked(parsed, layout)
    report = HostPreflight(layout=layout, asked=asked, exchange=exchange).check()
    verdicts, outcome = list(report.verdicts), report.outcome
    if not outcome.exit_code and identity.world_size > 1:
        # On links that are known to be ill, collectives would only hang.
        found = _check_collectives(dist.PrefixStore("group", shared), identity, layout, asked, exchange, backend=backend)
        verdicts += apply_modes(found.verdicts, asked.own.modes)
        outcome = decide(verdicts, host=layout.host, hosts=layout.hosts)
        if not found.usable and not outcome.exit_code:
            # What hangs is a failure, whatever was said of the check.
            outcome = decide(found.verdicts, host=layout.host, hosts=layout.hosts)
    if identity.speaks:
        show(verdicts, as_json=parsed.json)
    if layout.leads_host and outcome.exit_code:
        sys.stderr.write(f"elastictrain: {layout.host}: {outcome.reason}\n")
    return outcome.exit_code


def _check_collectives(
    store: dist.Store,
    identity: Identity,
    layout: HostLayout,
    asked: PreflightRequest,
    exchange: StoreExchange,
    *,
    backend: Backend,
) -> GroupFindings:
    off = frozenset(name for name, mode in asked.own.modes.items() if mode == "off")
    request = Request(full=asked.own.level is Level.FULL, off=off)
    try:
        group = make_group(store, identity, backend=backend, init_timeout_s=_GROUP_S, save_timeout_s=_GROUP_S)
        found = GroupChecks(group, exchange, identity, request, hosts=layout.hosts_of_ranks).run()
        if found.usable:
            leave(group)
    except RuntimeError as error:
        raise TransportError(f"the ranks do not come together in a group ({backend}): {error}") from error
    return found


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _asked(parsed: argparse.Namespace, layout: HostLayout) -> PreflightRequest:
    own = OwnChecks(
        level=Level(parsed.level),
        modes=dict(parsed.check),
        local_world_size=layout.local_world_size,
        run_dir=parsed.run_dir,
        memory_dir=parsed.memory_dir,
        several_hosts=len(layout.hosts) > 1,
        towards=layout.rendezvous,
    )
    defaults = PreflightGroup()
    return PreflightRequest(own=own, wait_s=defaults.wait_s, limit_s=defaults.limit_s, ports=tuple(parsed.port))
