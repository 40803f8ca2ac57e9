"""Set-up of snapshots in host memory: connects the savers of all hosts, and finds room for slots."""

import logging
import os
import platform
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.bounded_json import as_record
from elastictrain.checkpoint.checkpointer import used_versions
from elastictrain.checkpoint.copier import Arena, Copier, free_indices, slot_indices
from elastictrain.checkpoint.exchange import from_first, gather_json, gather_records
from elastictrain.checkpoint.manifest import JsonValue, digest_of
from elastictrain.checkpoint.memory.budget import (
    REPLICA_SLOTS,
    Buffers,
    decide_buffers,
    describe,
    least,
    memory_of,
    most_buffers,
)
from elastictrain.checkpoint.memory.choice import Rounds, agreed_steps
from elastictrain.checkpoint.memory.folder import (
    SlotName,
    SnapshotSet,
    look,
    make_private,
    run_folder,
    run_name,
    sets_to_keep,
)
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.slot import VERSION, SnapshotFacts
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.checkpoint.peers.client import OtherHosts
from elastictrain.checkpoint.peers.placement import Peer, replica_sources_of
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.saver.messages import SaverRoster, WorkerHello
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.checkpoint.signing import proof_of, signing_key
from elastictrain.checkpoint.snapshots import Snapshots
from elastictrain.checkpoint.tensor_bytes import dtype_name, own_items
from elastictrain.config.digest import config_digest
from elastictrain.errors import CheckpointError
from elastictrain.events import MemoryShort
from elastictrain.identity import Identity
from elastictrain.net.interfaces import own_address
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import absolute_url
from elastictrain.surroundings import Surroundings
from elastictrain.train.context import TrainContext
from elastictrain.train.saving import SynchronousSaving
from elastictrain.train.snapshot_saving import Saving, SnapshotSaving
from elastictrain.train.state import SavedState

logger = logging.getLogger(__name__)

_REMOTE_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    link: SaverLink | None
    restore: MemoryRestore
    others: OtherHosts | None = None  # access to other hosts' memory, if there are any
    trouble: str = ""  # why no snapshots can be taken (existing ones can be read): a host has no saver; alike on all ranks
    kept: tuple[int, ...] = ()  # ranks of other hosts whose replicas this host keeps

    @property
    def folder(self) -> str:
        return self.restore.folder


def start_saver(context: TrainContext, *, agent: int) -> SaverLink | None:
    """Start to connect to this host's saver; None if this host keeps nothing in memory. `agent` is the process that would
    restart this worker. Raises: ConfigError if host memory cannot be used as configured."""
    config, identity = context.config, context.identity
    options = config.checkpoint
    if options.buffers == 0:
        return None
    if not os.path.isdir(options.memory_dir) or platform.system() != "Linux":  # noqa: PTH112
        logger.warning(
            "no snapshots in host memory: `checkpoint.memory_dir` = %s is not a folder on this host", options.memory_dir
        )
        return None
    folder = run_folder(options.memory_dir, config.run.dir)
    make_private(folder)
    saver = SaverConfig(
        run_dir=absolute_url(config.run.dir),
        run=run_name(config.run.dir),
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        save_timeout_s=config.fault.save_timeout_s,
        flush_s=config.telemetry.flush_s,
        grace_s=config.fault.shutdown_grace_s,
        versions=used_versions(),
        manifest_bytes=int(options.manifest_mb * 2**20),
        key_env=options.key_env,
    )
    hello = WorkerHello(
        rank=identity.rank,
        ranks=tuple(identity.host_ranks),
        world_size=identity.world_size,
        incarnation=context.generation.name,
        agent=agent,
        address=_address(identity),
        key=proof_of(signing_key(config.checkpoint.key_env)),
    )
    link = SaverLink(folder, saver, hello, starts=identity.local_rank == 0, record=context.journal.record)
    link.start()
    return link


def connect_savers(context: TrainContext, link: SaverLink | None, *, arena: Arena | None = None) -> SnapshotMemory | None:
    """Connect the savers of all hosts with each other; None if snapshots are off. `arena`: slots that this process has mapped.
    Collective: yes."""
    config, identity, group = context.config, context.identity, context.group.control
    if config.checkpoint.buffers == 0:
        return None
    error = "a host keeps nothing in memory" if link is None else ""
    if link is not None:
        try:
            link.wait()
        except CheckpointError as exception:
            error = str(exception)
    port = link.port if link is not None else 0
    told = gather_json([error, identity.host, _address(identity), port, identity.local_rank], group=group)
    rows = as_record(told, list[tuple[str, str, str, int, int]])
    trouble = next((row[0] for row in rows if row[0]), "")
    own, roster = identity.host_ranks.start, _roster(rows)
    token = from_first(lambda: secrets.token_hex(32), group=group)
    others: OtherHosts | None = None
    kept: tuple[int, ...] = ()
    if not trouble and len(roster) > 1 and all(peer.port for peer in roster):
        others = OtherHosts(roster, token=bytes.fromhex(token))
        sources = (one for peer in roster if peer.number == own for one in replica_sources_of(peer, roster))
        kept = tuple(rank for one in sources for rank in one.ranks)
        if link is not None and identity.local_rank == 0:
            try:
                link.send_roster(SaverRoster(roster, own, token))
                error = link.broken
            except CheckpointError as exception:
                error = str(exception)
        # The others must not wait in vain for a rank whose saver did not take the roster.
        trouble = next((str(one) for one in gather_json(error, group=group) if one), "")
    if trouble and identity.is_log_rank:
        logger.warning("falling back to synchronous checkpoints: %s", trouble)
    restore = MemoryRestore(
        run_folder(config.checkpoint.memory_dir, config.run.dir),
        run=run_name(config.run.dir),
        host=own,
        lists_host_memory=identity.local_rank == 0 and link is not None,
        group=group,
        remote=others,
        names=[row[1] for row in rows],
        arena=arena,
    )
    return SnapshotMemory(link, restore, others, trouble, kept)


def _address(identity: Identity) -> str:
    """The address at which other hosts reach this one; empty without other hosts."""
    if identity.only_host:
        return ""
    # A host name that resolves to loopback here would lead the other hosts to themselves.
    return own_address(tuple(filter(None, [os.environ.get("MASTER_ADDR")])), surroundings=Surroundings())


def _roster(rows: Sequence[tuple[str, str, str, int, int]]) -> tuple[Peer, ...]:
    """The savers in the order of their ranks, each numbered by its first rank."""
    ranks: dict[int, list[int]] = {}
    for rank, (*_, local_rank) in enumerate(rows):
        ranks.setdefault(rank - local_rank, []).append(rank)
    return tuple(
        Peer(host=rows[number][1], address=rows[number][2], port=rows[number][3], ranks=tuple(of_host), number=number)
        for number, of_host in ranks.items()
    )


def make_saving(
    memory: SnapshotMemory | None,
    synchronous: SynchronousSaving,
    *,
    in_storage: bool,
    arena: Arena | None = None,
) -> Saving:
    """Allocate snapshot slots where all hosts have room; else training waits for checkpoints. Collective: yes. `in_storage`:
    storage has the restored state, or there is none. A state that only memory holds stays there until it is durable. `arena`:
    slots of the generation before, which are used again where they are the right ones, and closed otherwise. Raises:
    CheckpointError; StorageError if that state has to be written first, and cannot be."""
    saving = synchronous if memory is None else _choose_saving(memory, synchronous, in_storage=in_storage, arena=arena)
    if arena is not None and saving.arena is not arena:
        arena.close()
    return saving


def _choose_saving(memory: SnapshotMemory, synchronous: SynchronousSaving, *, in_storage: bool, arena: Arena | None) -> Saving:
    context, state, link = synchronous.context, synchronous.state, memory.link
    identity, group = context.identity, context.group.control
    if link is None or memory.trouble:
        return _without_memory(memory, synchronous, in_storage=in_storage)
    tensors = state.tensors()
    layout = _layout(state, context)
    # Each rank decides by itself what it writes, so all must have the same names.
    shapes = sorted((name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items())
    told = gather_json(digest_of(repr(shapes).encode()), group=group)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise CheckpointError(f"rank {rank} has other tensors than rank 0, so what they save would not fit together")
    buffers = _agree_on_buffers(memory, layout, context, allocating=arena is not None)
    if buffers.shortage and identity.is_log_rank:
        message = describe(buffers, replicate=_wants_replicas(memory, context))
        context.journal.record(MemoryShort(buffers=buffers.per_rank, replicate=buffers.replicate, message=message))
        synchronous.observer.print_line(message)
    sets = () if in_storage else sets_to_keep(memory.restore.whole())
    indices = _choose_slots(
        memory, layout, context, wanted=buffers.per_rank, kept_steps=[one.step for one in sets], allocating=arena is not None
    )
    if not indices:
        return _without_memory(memory, synchronous, in_storage=in_storage)
    if memory.others is not None:
        memory.others.close()
        link.replicates = buffers.replicate
    steps = _agree_on_steps(memory, indices, synchronous, sets=sets, layout=layout.digest)
    device = context.group.device
    if arena is None or not arena.take_over(layout, [SlotName("own", identity.rank, index) for index in indices]):
        if arena is not None:
            # Before others are made: both have the same names.
            arena.close()
        arena = Arena(memory.folder, layout, rank=identity.rank, indices=indices, device=device)
        # Beside the first step, which may compile: allocating takes as long as a third of page-locking.
        arena.allocate()
    snapshots = Snapshots(
        arena,
        Copier(layout, changing=state.changed_by_forward(), device=device),
        link,
        facts=_facts(context, run=memory.restore.run, layout=layout.digest),
        steps=steps,
        flush_records=synchronous.flush_records,
        record=context.journal.record if identity.is_log_rank else None,
    )
    # Remotely each snapshot sends the records of its steps: one more object for each log.
    pause_s = 0.0 if isinstance(context.store, LocalStore) else _REMOTE_PAUSE_S
    rounds = Rounds.after(sets, incarnation=context.generation.name) if buffers.replicate else None
    return SnapshotSaving(synchronous, snapshots, link, rounds=rounds, pause_s=pause_s, keeps=memory.kept)


def share_arena(context: TrainContext, state: SavedState) -> Arena | None:
    """For a standby of one rank: map and page-lock the slots of the worker that has this rank now, in the background. Then the
    successor's snapshots begin at once. None if this host keeps nothing in memory."""
    options, rank = context.config.checkpoint, context.identity.rank
    folder, layout = run_folder(options.memory_dir, context.config.run.dir), _layout(state, context)
    wanted = most_buffers(options.buffers, replicate=options.replicate)
    indices, _ = slot_indices(folder, rank=rank, size_bytes=layout.file_bytes, wanted=wanted, allocating=True)
    if not indices:
        return None
    arena = Arena(folder, layout, rank=rank, indices=indices, device=context.group.device, of_another=True)
    arena.start()
    return arena


def _layout(state: SavedState, context: TrainContext) -> RankLayout:
    identity, shard_bytes = context.identity, int(context.config.checkpoint.shard_mb * 2**20)
    world_size, of_first = identity.world_size, state.changed_by_forward()
    items = own_items(state.tensors(), rank=identity.rank, world_size=world_size, of_first=of_first)
    return RankLayout(items, shard_bytes=shard_bytes)


def _facts(context: TrainContext, *, run: str, layout: str) -> SnapshotFacts:
    """What is known of each snapshot of this rank before it is taken."""
    return SnapshotFacts(
        version=VERSION,
        run=run,
        incarnation=context.generation.name,
        step=0,
        world_size=context.identity.world_size,
        rank=context.identity.rank,
        layout=layout,
        config_digest=config_digest(context.config),
        created=0.0,
        reason="",
        state={},
    )


def _without_memory(memory: SnapshotMemory, synchronous: SynchronousSaving, *, in_storage: bool) -> SynchronousSaving:
    """Fall back to synchronous checkpoints, and release host memory. Collective: yes."""
    link = memory.link
    if memory.others is not None:
        memory.others.close()
    if not in_storage:
        # `finish` makes the saver clear host memory, which until now is the only place of the restored state.
        synchronous.save_now(synchronous.state.step, "interval")
    if link is not None and memory.trouble and in_storage:
        # A later start may be able to read what this one could not.
        link.close()
    elif link is not None:
        link.finish(synchronous.context.config.fault.shutdown_grace_s)
    return synchronous


def _wants_replicas(memory: SnapshotMemory, context: TrainContext) -> bool:
    return context.config.checkpoint.replicate and memory.others is not None


def _agree_on_buffers(memory: SnapshotMemory, layout: RankLayout, context: TrainContext, *, allocating: bool) -> Buffers:
    """The slots for which all hosts have room; existing slots are used again. `allocating`: as in `slot_indices`. Collective:
    yes."""
    options, identity, group = context.config.checkpoint, context.identity, context.group.control
    replicate = _wants_replicas(memory, context)
    most = most_buffers(options.buffers, replicate=replicate)
    _, fitting = slot_indices(
        memory.folder, rank=identity.rank, size_bytes=layout.file_bytes, wanted=most, allocating=allocating
    )
    host = identity.host_ranks.start
    sizes: dict[int, int] = {}
    held = held_replicas = 0
    rows = as_record(gather_json([host, layout.file_bytes, len(fitting)], group=group), list[tuple[int, int, int]])
    for rank, (its_host, size_bytes, there) in enumerate(rows):
        sizes[its_host] = sizes.get(its_host, 0) + size_bytes
        held += size_bytes * there if its_host == host else 0
        for index in range(REPLICA_SLOTS) if rank in memory.kept else ():
            with suppress(OSError):
                path = f"{memory.folder}/{SlotName('replica', rank, index)}"
                held_replicas += size_bytes * (os.stat(path).st_size == size_bytes)  # noqa: PTH116
    choice = decide_buffers(
        memory_of(memory.folder, held_bytes=held, held_replica_bytes=held_replicas),
        wanted=options.buffers,
        replicate=replicate,
        snapshot_bytes=sizes[host],
        replica_bytes=max(sizes.values()),
    )
    return least(gather_records(choice, group=group))


def _choose_slots(
    memory: SnapshotMemory,
    layout: RankLayout,
    context: TrainContext,
    *,
    wanted: int,
    kept_steps: Collection[int],
    allocating: bool,
) -> Sequence[int]:
    """The numbers of this rank's slots, equally many on all ranks; ranks refer to slots by their index. `allocating`: as in
    `slot_indices`. Collective: yes."""
    rank, size_bytes = context.identity.rank, layout.file_bytes
    with suppress(OSError):
        free_indices(memory.folder, rank=rank, size_bytes=size_bytes, wanted=wanted, kept_steps=kept_steps)
    indices, _ = slot_indices(memory.folder, rank=rank, size_bytes=size_bytes, wanted=wanted, allocating=allocating)
    return indices[: min(as_record(gather_json(len(indices), group=context.group.control), list[int]))]


def _agree_on_steps(
    memory: SnapshotMemory, indices: Sequence[int], synchronous: SynchronousSaving, *, sets: Sequence[SnapshotSet], layout: str
) -> list[int | None]:
    """Step of the snapshot that every rank already holds in the same slot, or another host for it, by slot: only those of these
    sets count. Two generations may have reached the same step, and a slot may have the size of another layout. Collective:
    yes."""
    context = synchronous.context
    wanted = {(one.incarnation, one.world_size, one.step, layout) for one in sets}
    held = {
        one.slot: one.facts.step
        for one in look(memory.folder, host=0)
        if one.facts.run == memory.restore.run
        and (one.facts.incarnation, one.facts.world_size, one.facts.step, one.facts.layout) in wanted
    }
    told: list[JsonValue] = [held.get(str(SlotName("own", context.identity.rank, index))) for index in indices]
    rows = as_record(gather_json(told, group=context.group.control), list[list[int | None]])
    return agreed_steps(rows, sets=sets)
