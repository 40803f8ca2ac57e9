"""The preflight command under torchrun: checks all hosts of the group and their links; one rank shows the verdicts."""

import os
import sys
from dataclasses import replace

import torch.distributed as dist

from elastictrain.distributed.device import find_backend
from elastictrain.distributed.generation import Introduction, agree, check_alike
from elastictrain.distributed.group import connect, leave, make_group
from elastictrain.distributed.store import BoundedStore, StoreExchange
from elastictrain.errors import EXIT_OK, TransportError
from elastictrain.identity import read_identity
from elastictrain.preflight.group.checks import GroupChecks, Request
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostPreflight, find_layout
from elastictrain.preflight.policy import Level, apply_modes, decide
from elastictrain.preflight.verdict import show

_RENDEZVOUS_S = 60.0
_GROUP_S = 60.0


def check_group(own: OwnChecks, *, as_json: bool) -> int:
    """Runs on every rank of torchrun; returns its exit code. Collective: yes. Raises: ElasticTrainError."""
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
    own = replace(own, local_world_size=layout.local_world_size, several_hosts=len(layout.hosts) > 1, towards=layout.rendezvous)
    exchange = store.ask(lambda: StoreExchange(shared))
    report = HostPreflight(layout=layout, own=own, exchange=exchange).check()
    verdicts, error = list(report.verdicts), report.error
    if error is None and (identity.world_size > 1 or backend == "nccl"):
        # On broken links, collectives would only hang.
        request = Request(full=own.level is Level.FULL, settings=own.settings)
        try:
            group = make_group(
                dist.PrefixStore("group", shared), identity, backend=backend, init_timeout_s=_GROUP_S, save_timeout_s=_GROUP_S
            )
            found = GroupChecks(group, exchange, identity, request, hosts=layout.hosts_of_ranks).run()
            if found.usable:
                leave(group)
        except RuntimeError as broken:
            raise TransportError(f"the ranks do not come together in a group ({backend}): {broken}") from broken
        verdicts += apply_modes(found.verdicts, own.settings.modes)
        error = decide(verdicts, host=layout.host, hosts=layout.hosts)
        if not found.usable and error is None:
            # A hang is a failure, whatever the mode of its check.
            error = decide(found.verdicts, host=layout.host, hosts=layout.hosts)
    if identity.is_log_rank:
        show(verdicts, as_json=as_json)
    if error is None:
        return EXIT_OK
    if layout.leads_host:
        sys.stderr.write(f"elastictrain: {layout.host}: {error}\n")
    return error.exit_code


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
