"""Room for snapshots in host memory: how much of it, in which slots, and what is in them already."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch import Tensor

from elastictrain.checkpoint.exchange import gather_json
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
from elastictrain.checkpoint.memory.folder import SlotName, SnapshotSet, look
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.snapshot.arena import Arena, free_indices, slot_indices
from elastictrain.checkpoint.snapshot.boxes import own_items
from elastictrain.checkpoint.snapshot.copier import Copier
from elastictrain.checkpoint.snapshot.snapshots import SnapshotOrigin, Snapshots
from elastictrain.checkpoint.tensor_bytes import dtype_name
from elastictrain.config.digest import config_digest
from elastictrain.errors import CheckpointError
from elastictrain.events import MemoryShort
from elastictrain.train.context import TrainContext
from elastictrain.train.keepers import SnapshotMemory
from elastictrain.train.saving import SynchronousSaving
from elastictrain.train.snapshot_saving import Saving, SnapshotSaving

logger = logging.getLogger(__name__)


def make_saving(memory: SnapshotMemory | None, synchronous: SynchronousSaving, *, in_storage: bool) -> Saving:
    """Room for snapshots where hosts have it; else training waits for checkpoints.

    `in_storage`: whether the state that was restored is there, or there is none; what is only in memory stays there until it is
    durable. Collective: yes. Raises: CheckpointError, StorageError if it has to be written first, and cannot be.
    """
    if memory is None:
        return synchronous
    context, state, link = synchronous.context, synchronous.state, memory.link
    config, identity, group = context.config, context.identity, context.group.control
    if link is None or memory.trouble:
        return _without_memory(memory, synchronous, in_storage=in_storage)
    tensors = state.tensors()
    layout = RankLayout(
        own_items(tensors, rank=identity.rank, world_size=identity.world_size),
        shard_bytes=int(config.checkpoint.shard_mb * 2**20),
    )
    _check_alike(tensors, group=group)
    buffers = _agree_on_buffers(memory, layout, context)
    if buffers.shortage and identity.speaks:
        message = describe(buffers)
        context.journal.record(MemoryShort(buffers=buffers.per_rank, replicate=buffers.replicate, message=message))
        synchronous.observer.say(message)
    restored_step = None if in_storage else state.step
    indices = _choose_slots(memory, layout, context, wanted=buffers.per_rank, restored_step=restored_step)
    if not indices:
        return _without_memory(memory, synchronous, in_storage=in_storage)
    if memory.others is not None:
        memory.others.close()
        link.replicate(on=buffers.replicate)
    restored = None if in_storage else memory.recall.best()
    steps = _agree_on_steps(memory, indices, synchronous, restored=restored, layout=layout.digest)
    device = context.group.device
    arena = Arena(memory.folder, layout, rank=identity.rank, indices=indices, device=device)
    snapshots = Snapshots(
        arena,
        Copier(layout, changing=state.changed_by_forward(), device=device),
        link,
        origin=SnapshotOrigin(
            run=memory.run,
            incarnation=context.incarnation.name,
            world_size=identity.world_size,
            rank=identity.rank,
            layout=layout.digest,
            config_digest=config_digest(config),
        ),
        steps=list(steps),
        flush_records=synchronous.flush_records,
        record=context.journal.record if identity.speaks else None,
    )
    return SnapshotSaving(
        synchronous, snapshots, link, slots=indices, steps=steps, unusable=lambda: link.broken or arena.broken
    )


def _without_memory(memory: SnapshotMemory, synchronous: SynchronousSaving, *, in_storage: bool) -> SynchronousSaving:
    """Training waits for checkpoints, and host memory is given back. Collective: yes."""
    link = memory.link
    if memory.others is not None:
        memory.others.close()
    if not in_storage:
        # A saver clears host memory when it is told to finish, and until then nothing else holds what was restored.
        synchronous.save_now(synchronous.state.step, "interval")
    if link is not None and memory.trouble and in_storage:
        # What could not be read here may be of use to a later start.
        link.close()
    elif link is not None:
        link.finish(synchronous.context.config.fault.shutdown_grace_s)
    return synchronous


def _check_alike(tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None) -> None:
    """Each rank decides by itself what it writes, so all must have the same names. Raises: CheckpointError."""
    facts = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    told = gather_json(digest_of(repr(sorted(facts, key=str)).encode()), group=group)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise CheckpointError(f"rank {rank} has other tensors than rank 0, so what they save would not fit together")


def _agree_on_buffers(memory: SnapshotMemory, layout: RankLayout, context: TrainContext) -> Buffers:
    """What all hosts have room for. Collective: yes."""
    options, identity, group = context.config.checkpoint, context.identity, context.group.control
    replicate = options.replicate and memory.others is not None
    most = most_buffers(options.buffers, replicate=replicate)
    _, fitting = slot_indices(memory.folder, rank=identity.rank, size_bytes=layout.file_bytes, wanted=most)
    host = identity.host_ranks.start
    sizes: dict[int, int] = {}
    held = held_replicas = 0
    for rank, row in enumerate(gather_json([host, layout.file_bytes, len(fitting)], group=group)):
        assert isinstance(row, list)  # noqa: S101
        its_host, size_bytes, there = (int(str(value)) for value in row)
        sizes[its_host] = sizes.get(its_host, 0) + size_bytes
        held += size_bytes * there if its_host == host else 0
        held_replicas += size_bytes * _replicas_held(memory, rank=rank, size_bytes=size_bytes)
    choice = decide_buffers(
        memory_of(memory.folder, held_bytes=held, held_replica_bytes=held_replicas),
        wanted=options.buffers,
        replicate=replicate,
        snapshot_bytes=sizes[host],
        replica_bytes=max(sizes.values()),
    )
    told = gather_json([choice.per_rank, choice.replicate, choice.shortage], group=group)
    return least([Buffers(int(str(row[0])), bool(row[1]), str(row[2])) for row in told if isinstance(row, list)])


def _choose_slots(
    memory: SnapshotMemory, layout: RankLayout, context: TrainContext, *, wanted: int, restored_step: int | None
) -> Sequence[int]:
    """The numbers of this rank's slots: as many on all ranks, which speak of them by their places. Collective: yes."""
    rank, size_bytes = context.identity.rank, layout.file_bytes
    with suppress(OSError):
        free_indices(memory.folder, rank=rank, size_bytes=size_bytes, wanted=wanted, restored_step=restored_step)
    indices, _ = slot_indices(memory.folder, rank=rank, size_bytes=size_bytes, wanted=wanted)
    return indices[: min(int(str(count)) for count in gather_json(len(indices), group=context.group.control))]


def _replicas_held(memory: SnapshotMemory, *, rank: int, size_bytes: int) -> int:
    """How many slots for replicas of a rank this host has already and uses again."""
    if rank not in memory.kept:
        return 0
    held = 0
    for index in range(REPLICA_SLOTS):
        with suppress(OSError):
            held += os.stat(f"{memory.folder}/{SlotName('replica', rank, index)}").st_size == size_bytes  # noqa: PTH116
    return held


def _agree_on_steps(
    memory: SnapshotMemory, indices: Sequence[int], synchronous: SynchronousSaving, *, restored: SnapshotSet | None, layout: str
) -> list[int | None]:
    """Of the snapshots that every rank holds in the same slot already: only the one that was restored counts.

    Two incarnations may have come to one step, and a slot may have the size of another layout. Collective: yes.
    """
    context, step, whole = synchronous.context, synchronous.state.step, list[JsonValue]()
    wanted = (restored.incarnation, restored.world_size, step, layout) if restored is not None else None
    held = {one.slot: one.facts for one in look(memory.folder, host=0) if one.facts.run == memory.run}
    for index in indices:
        facts = held.get(str(SlotName("own", context.identity.rank, index)))
        whole.append(facts is not None and (facts.incarnation, facts.world_size, facts.step, facts.layout) == wanted)
    rows = [row for row in gather_json(whole, group=context.group.control) if isinstance(row, list)]
    return [step if all(row[place] for row in rows) else None for place in range(len(indices))]
