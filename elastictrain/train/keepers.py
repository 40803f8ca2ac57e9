"""Finds this host's keeper, makes those of all hosts known to each other, and says what can be read of what they keep."""

import logging
import os
import platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastictrain.checkpoint.exchange import from_first, gather_json
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.folder import make_private, run_folder, run_name
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.checkpoint.peers.client import OtherHosts
from elastictrain.checkpoint.peers.placement import replica_sources_of, roster_from_json
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.saver.messages import Message, RunFacts
from elastictrain.checkpoint.signing import proof_of
from elastictrain.errors import CheckpointError
from elastictrain.identity import Identity
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.interfaces import own_address
from elastictrain.storage.opening import absolute_url
from elastictrain.train.checks import signing_key
from elastictrain.train.context import TrainContext
from elastictrain.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """This rank's way to host memory."""

    folder: str
    run: str
    link: SaverLink | None
    recall: MemoryRestore
    others: OtherHosts | None
    """The way to other hosts' memory, where there are others."""

    trouble: str = ""
    """Why no snapshots can be taken, though those that are there can be read: a host has no keeper. The same on all ranks."""

    kept: tuple[int, ...] = ()
    """The ranks of other hosts whose replicas this host keeps."""


def start_keeper(context: TrainContext, *, agent: int) -> SaverLink | None:
    """Begin to reach this host's keeper; None if this host keeps nothing in memory. `agent` is the process that would start
    this worker again. Raises: ConfigError if host memory cannot be used as configured."""
    config, identity = context.config, context.identity
    options = config.checkpoint
    if options.buffers == 0:
        return None
    if not os.path.isdir(options.memory_dir) or platform.system() != "Linux":  # noqa: PTH112
        logger.warning("no snapshots in host memory: `checkpoint.memory_dir` = %s is no folder here", options.memory_dir)
        return None
    folder = run_folder(options.memory_dir, config.run.dir)
    make_private(folder)
    versions = {"elastictrain": __version__, "torch": torch.__version__, "python": platform.python_version()}
    facts = RunFacts(
        run_dir=absolute_url(config.run.dir),
        run=run_name(config.run.dir),
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        save_timeout_s=config.fault.save_timeout_s,
        flush_s=config.telemetry.flush_s,
        grace_s=config.fault.shutdown_grace_s,
        versions=versions,
        key_env=options.key_env,
    )
    ranks: list[JsonValue] = list(identity.host_ranks)
    link = SaverLink(
        folder,
        facts,
        {
            "op": "hello",
            "rank": identity.rank,
            "ranks": ranks,
            "world_size": identity.world_size,
            "incarnation": context.incarnation.name,
            "agent": agent,
            "address": _address(identity),
            "port": 0,
            "key": proof_of(signing_key(config)),
        },
        starts=identity.local_rank == 0,
        record=context.journal.record,
    )
    link.start()
    return link


def meet_keepers(context: TrainContext, link: SaverLink | None) -> SnapshotMemory | None:
    """Make the keepers of all hosts known to each other; None if no snapshots are wanted. Collective: yes."""
    config, identity, group = context.config, context.identity, context.group.control
    if config.checkpoint.buffers == 0:
        return None
    error = "a host keeps nothing in memory" if link is None else ""
    if link is not None:
        try:
            link.wait()
        except CheckpointError as exception:
            error = str(exception)
    told = gather_json(
        [error, identity.host, _address(identity), link.port if link is not None else 0, identity.local_rank], group=group
    )
    rows = [row for row in told if isinstance(row, list)]
    trouble = next((str(row[0]) for row in rows if row[0]), "")
    hosts = _hosts(rows)
    own = identity.host_ranks.start
    token = from_first(lambda: secrets.token_hex(32).encode(), group=group).decode()
    others: OtherHosts | None = None
    kept: tuple[int, ...] = ()
    if not trouble and len(hosts) > 1 and all(isinstance(host, dict) and host["port"] for host in hosts):
        roster = roster_from_json(hosts)
        others = OtherHosts(roster, token=bytes.fromhex(token))
        sources = (one for peer in roster if peer.number == own for one in replica_sources_of(peer, roster))
        kept = tuple(rank for one in sources for rank in one.ranks)
        if link is not None and identity.local_rank == 0:
            error = _meet(link, {"op": "roster", "hosts": hosts, "own": own, "token": token})
        # The others must not wait in vain for a rank whose keeper took no note.
        trouble = next((str(one) for one in gather_json(error, group=group) if one), "")
    if trouble and identity.speaks:
        logger.warning("checkpoints are written while training waits: %s", trouble)
    recall = MemoryRestore(
        run_folder(config.checkpoint.memory_dir, config.run.dir),
        run=run_name(config.run.dir),
        host=own,
        speaks_for_host=identity.local_rank == 0 and link is not None,
        group=group,
        remote=others,
        names=[str(row[1]) for row in rows],
    )
    return SnapshotMemory(recall.folder, recall.run, link, recall, others, trouble, kept)


def _meet(link: SaverLink, roster: Message) -> str:
    """Why the keeper did not take note of the others; empty if it did."""
    try:
        link.meet(roster)
    except CheckpointError as error:
        return str(error)
    return link.broken


def _address(identity: Identity) -> str:
    """By which other hosts reach this one, if there are any."""
    if identity.only_host:
        return ""
    # A name of this host that means loopback here would lead the others to themselves.
    return own_address(tuple(filter(None, [os.environ.get("MASTER_ADDR")])), surroundings=Surroundings())


def _hosts(rows: Sequence[Sequence[JsonValue]]) -> list[JsonValue]:
    """The hosts in the order of their ranks, each numbered by its first rank."""
    ranks: dict[int, list[JsonValue]] = {}
    for rank, row in enumerate(rows):
        ranks.setdefault(rank - int(str(row[4])), []).append(rank)
    hosts: list[JsonValue] = []
    for number, of_host in ranks.items():
        _, host, address, port, _ = rows[number]
        hosts.append({"host": host, "address": address, "port": port, "number": number, "ranks": of_host})
    return hosts
