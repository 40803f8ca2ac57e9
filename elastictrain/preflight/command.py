"""The preflight command under torchrun: checks all hosts of the group and their links; one rank shows the verdicts."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from elastictrain.distributed.device import find_backend
from elastictrain.distributed.generation import Introduction, agree, check_alike
from elastictrain.distributed.group import connect, leave, make_group
from elastictrain.distributed.store import BoundedStore, StoreExchange
from elastictrain.errors import EXIT_OK, TransportError
from elastictrain.identity import read_identity
from elastictrain.preflight.group.checks import GroupChecks, Request
from elastictrain.preflight.group.measurements import BandwidthPoint, PairBandwidth, size_text
from elastictrain.preflight.host.gpu import decimal
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostPreflight, find_layout
from elastictrain.preflight.policy import Level, apply_modes, decide
from elastictrain.preflight.verdict import show
from elastictrain.surroundings import Surroundings

logger = logging.getLogger(__name__)

_RENDEZVOUS_S = 60.0
_GROUP_S = 60.0
_TESTS_S = 60.0


def check_group(own: OwnChecks, *, as_json: bool, table: bool) -> int:
    """Runs on every rank of torchrun; returns its exit code. Collective: yes. Raises: ElasticTrainError."""
    identity = read_identity(os.environ)
    backend, _ = find_backend("auto", environment=os.environ, local_world_size=identity.local_world_size)
    store = BoundedStore(lambda: connect(identity, timeout_s=_RENDEZVOUS_S), limit_s=_RENDEZVOUS_S)
    introduction = Introduction(identity.host, identity.local_world_size, backend, digest="")
    generation = agree(store, identity, introduction, number=0, timeout_s=store.left_s, tell=logger.warning)
    check_alike(generation)
    shared = dist.PrefixStore(f"elastictrain/{generation.name}/preflight", store.unbounded)
    ranks, address = [(one.host, one.local_world_size) for one in generation.ranks], os.environ.get("MASTER_ADDR")
    layout = find_layout(ranks, rank=identity.rank, local_rank=identity.local_rank, rendezvous=address)
    own = replace(own, local_world_size=layout.local_world_size, several_hosts=len(layout.hosts) > 1, towards=layout.rendezvous)
    exchange = store.ask(lambda: StoreExchange(shared))
    report = HostPreflight(layout=layout, own=own, exchange=exchange).check()
    verdicts, error = list(report.verdicts), report.error
    if error is None and (identity.world_size > 1 or backend == "nccl"):
        # On broken links, collectives would only hang.
        request = Request(full=own.level is Level.FULL, table=table, settings=own.settings)
        try:
            own_store = dist.PrefixStore("group", shared)
            group = make_group(own_store, identity, backend=backend, init_timeout_s=_GROUP_S, save_timeout_s=_GROUP_S)
            found = GroupChecks(group, exchange, identity, request, hosts=layout.hosts_of_ranks).run()
            if found.usable:
                leave(group)
        except RuntimeError as broken:
            raise TransportError(f"the ranks do not come together in a group ({backend}): {broken}") from broken
        verdicts += apply_modes(found.verdicts, own.settings.modes)
        # A hang is a failure, whatever the mode of its check.
        decisive = (verdicts, found.verdicts if not found.usable else ())
        error = next(filter(None, (decide(one, host=layout.host, hosts=layout.hosts) for one in decisive)), None)
        if identity.is_log_rank and table:
            stream = sys.stderr if as_json else sys.stdout
            alone = found.usable and backend == "nccl" and len(layout.hosts) == 1
            theirs = ask_nccl_tests(Surroundings(), num_gpus=identity.world_size) if alone else {}
            tables = *bus_table(found.points, theirs), *pair_tables(found.pairs, layout.hosts_of_ranks)
            stream.write("\n".join([*tables, ""]))
    if identity.is_log_rank:
        show(verdicts, as_json=as_json)
    if error is None:
        return EXIT_OK
    if layout.local_rank == 0:
        sys.stderr.write(f"elastictrain: {layout.host}: {error}\n")
    return error.exit_code


def bus_table(points: Sequence[BandwidthPoint], theirs: Mapping[int, float]) -> Iterator[str]:
    """All-reduce by size, with the columns of nccl-tests, and its own figures (`theirs`) if there are any."""
    yield f"{'all_reduce':>12} {'time (us)':>12} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}" + " nccl-tests" * bool(theirs)
    for one in points:
        algorithm_gbs = one.num_bytes / one.seconds / 1e9
        row = f"{size_text(one.num_bytes):>12} {1e6 * one.seconds:12.1f} {algorithm_gbs:13.2f} {one.bus_gbs:13.2f}"
        yield row + (f" {theirs[one.num_bytes]:10.2f}" if one.num_bytes in theirs else "")


def ask_nccl_tests(surroundings: Surroundings, *, num_gpus: int) -> dict[int, float]:
    """Bus bandwidth in GB/s by bytes, in place between this host's GPUs, by `all_reduce_perf`; empty without it. Source: its
    columns are size, count, type, redop, root, then time, algbw, busbw and #wrong, first out of place and then in place."""
    told = surroundings.ask("all_reduce_perf", "-b", "1K", "-e", "1G", "-f", "4", "-g", str(num_gpus), limit_s=_TESTS_S)
    rows = [words for line in told.splitlines() if len(words := line.split()) == 13 and words[0].isdecimal()]
    return {int(words[0]): busbw for words in rows if (busbw := decimal(words[11])) is not None}


def pair_tables(pairs: Mapping[int, Sequence[PairBandwidth]], hosts: Sequence[str]) -> Iterator[str]:
    """GB/s from each rank (row) to each other one of its host (column), host by host."""
    for host in dict.fromkeys(hosts[rank] for rank in pairs):
        ranks = [rank for rank in sorted(pairs) if hosts[rank] == host]
        gbs = {(one.source, rank): one.gbs for rank in ranks for one in pairs[rank]}
        yield f"\n{host + ', GB/s':>12} " + " ".join(f"{f'to {rank}':>8}" for rank in ranks)
        for source in ranks:
            cells = (f"{gbs[source, rank]:8.2f}" if (source, rank) in gbs else f"{'-':>8}" for rank in ranks)
            yield f"{f'from {source}':>12} " + " ".join(cells)
