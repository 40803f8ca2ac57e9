"""Keeps replicas for other hosts: two slots per rank, of which the one with the newest whole replica is never overwritten."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from elastictrain.checkpoint.memory.budget import REPLICA_SLOTS, HostMemory, decide_buffers, memory_of
from elastictrain.checkpoint.memory.folder import SlotName, remove_slot, slot_names
from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, store_digests, store_layout
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts, facts_in
from elastictrain.checkpoint.peers.requests import Put
from elastictrain.errors import CheckpointError, InvalidCheckpointError
from elastictrain.net.channel import FRAME_BYTES


class RefusedError(Exception):
    """A replica that is not taken now; the message is for the other side."""


def choose_replica_slot(held: Sequence[SnapshotFacts | None]) -> int:
    """Which slot the next replica goes to: never the newest whole one, and what is not whole first. Pure.

    `held[i]` is the whole snapshot in slot i. Incarnations come before steps: after a restart from an older step, what the old
    incarnation had reached is not the newest any more.
    """
    whole = {index: (facts.incarnation, facts.step) for index, facts in enumerate(held) if facts is not None}
    return next((index for index in range(len(held)) if index not in whole), min(whole, key=whole.__getitem__, default=0))


class ReplicaSlots:
    """The replicas in a run's folder; safe to use from several threads. No other process writes replicas there."""

    def __init__(self, folder: str, *, run: str, memory: Callable[..., HostMemory] = memory_of) -> None:
        """`memory` tells what the host has, as `memory_of` does."""
        self._folder = folder
        self._run = run
        self._memory = memory
        self._lock = threading.Lock()
        self._kept: frozenset[int] = frozenset()
        self._arriving: set[int] = set()

    def set_kept(self, ranks: Iterable[int]) -> None:
        """Replicas of these ranks are taken from now on, and of no others."""
        with self._lock:
            self._kept = frozenset(ranks)

    def drop_others(self) -> None:
        """Remove the replicas of ranks that are not kept any more; who has one mapped keeps its memory until then."""
        for name in slot_names(self._folder):
            if name.kind == "replica" and not self._keeps(name.rank):
                remove_slot(self._folder, name)

    def take(self, put: Put, *, go: Callable[[], None], receive: Callable[[memoryview], int]) -> bool:
        """Store a replica; False if it is here already, and nothing was received.

        `go` is called when there is room; `receive` fills the beginning of what it is given, and returns how much. Whatever
        fails, the newest whole replica of the rank stays as it is.

        Raises: RefusedError if it is not wanted, or not now; CheckpointError if there is no memory, or the bytes do not have
        their digests; OSError; whatever `go` and `receive` raise.
        """
        if put.facts.run != self._run:
            raise RefusedError(f"this host keeps replicas of run {self._run}, not of {put.facts.run!r:.200}")
        if not self._keeps(put.facts.rank):
            raise RefusedError(f"this host does not keep replicas of rank {put.facts.rank}")
        with self._alone_with(put.facts.rank):
            paths = [f"{self._folder}/{SlotName('replica', put.facts.rank, index)}" for index in range(REPLICA_SLOTS)]
            held = [_facts_in(path, put.facts) for path in paths]
            for path, facts in zip(paths, held, strict=True):
                if facts is not None and facts == put.facts and load_digests(path, facts) == put.digests:
                    return False
            self._fill(paths[choose_replica_slot(held)], put, go=go, receive=receive)
            return True

    def _fill(self, path: str, put: Put, *, go: Callable[[], None], receive: Callable[[memoryview], int]) -> None:
        self._check_room(path, put.layout.size_bytes)
        slot = Slot.make(path, size_bytes=put.layout.size_bytes)
        try:
            if not slot.lock(shared=False):
                raise RefusedError(f"the older replica of rank {put.facts.rank} is being read")
            slot.begin()
            store_layout(self._folder, put.layout)
            store_digests(path, put.facts, put.digests)
            go()
            _receive_into(slot, put, receive)
            # Ranks may have been shared out anew in the meantime, and the slot removed.
            if not self._keeps(put.facts.rank) or not slot.is_current():
                raise RefusedError(f"this host does not keep replicas of rank {put.facts.rank} any more")
            slot.complete(put.facts)
        finally:
            slot.close()

    def _check_room(self, path: str, size_bytes: int) -> None:
        """Memory that a slot has already is not asked for again. Raises: CheckpointError."""
        there = 0
        with suppress(FileNotFoundError):
            there = os.lstat(path).st_size
        if there == HEADER_BYTES + size_bytes:
            return
        memory = self._memory(self._folder, held_bytes=there)
        choice = decide_buffers(memory, wanted=1, replicate=False, snapshot_bytes=HEADER_BYTES + size_bytes, replica_bytes=0)
        if not choice.per_rank:
            raise CheckpointError(choice.shortage)

    def _keeps(self, rank: int) -> bool:
        with self._lock:
            return rank in self._kept

    @contextmanager
    def _alone_with(self, rank: int) -> Iterator[None]:
        # A sender that gave up and came back could meet its own first attempt, which has not noticed yet.
        with self._lock:
            if rank in self._arriving:
                raise RefusedError(f"a replica of rank {rank} is arriving already")
            self._arriving.add(rank)
        try:
            yield
        finally:
            with self._lock:
                self._arriving.remove(rank)


def _receive_into(slot: Slot, put: Put, receive: Callable[[memoryview], int]) -> None:
    with slot.data as data:
        position = 0
        while position < len(data):
            position += receive(data[position : position + FRAME_BYTES])
    found = compute_digests(slot, put.layout)
    if found != replace(put.digests, sha256=()):
        same = [a == b for a, b in zip(found.files, put.digests.files, strict=True)]
        files = put.layout.files(incarnation=put.facts.incarnation, rank=put.facts.rank)
        wrong = [file.name for file, is_same in zip(files, same, strict=True) if not is_same]
        raise InvalidCheckpointError(f"the bytes of {', '.join(wrong) or 'its chunks'} do not have their digests")


def _facts_in(path: str, coming: SnapshotFacts) -> SnapshotFacts | None:
    """The whole snapshot in a slot, if it is one of the same rank and run."""
    facts = facts_in(path)
    return facts if facts is not None and (facts.run, facts.rank) == (coming.run, coming.rank) else None
