"""The listening side: serves snapshots of this host, and stores replicas of other hosts. Free of torch."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from msgspec.structs import replace

from elastictrain.checkpoint.memory.budget import REPLICA_SLOTS, decide_buffers, memory_of
from elastictrain.checkpoint.memory.folder import SlotName, remove_slot, slot_names
from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, store_digests, store_layout
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts, SnapshotId, facts_in
from elastictrain.checkpoint.peers.requests import (
    HANDSHAKE,
    Get,
    Limits,
    Put,
    RefusedError,
    parse_request,
)
from elastictrain.errors import CheckpointError, InvalidCheckpointError, TransportError
from elastictrain.net.channel import FRAME_BYTES, Channel, Secret
from elastictrain.net.listening import BACKLOG
from elastictrain.net.server import CONNECTIONS, ChannelServer, PendingLimits


@contextmanager
def locked_snapshot(folder: str, get: Get) -> Iterator[Slot]:
    """Yield the slot, own or replica, with this snapshot, locked against its writer. Raises: RefusedError if none has it."""
    asked = (get.run, get.incarnation, get.step, get.rank)
    for name in slot_names(folder):
        slot = None
        with suppress(OSError):
            slot = Slot.hold(f"{folder}/{name}") if name.rank == get.rank else None
        if slot is None:
            continue
        with closing(slot):
            facts = slot.facts
            if facts is not None and (facts.run, facts.incarnation, facts.step, facts.rank) == asked:
                yield slot
                return
    raise RefusedError(f"{get} is not here", code="missing")


def choose_replica_slot(held: Sequence[SnapshotFacts | None], *, safe: SnapshotId | None = None) -> int:
    """Return the slot for the next replica: one without a whole snapshot first, then the oldest, never that of `safe`: it may
    be the newest step of which all ranks have replicas. Pure.

    `held[i]` is the whole snapshot in slot i. Incarnations are compared before steps: after a restart from an older step, a
    higher step of the old incarnation is not the newest.
    """
    order = [(facts is not None, facts is not None and facts.id == safe, facts.id if facts else ()) for facts in held]
    return min(range(len(held)), key=order.__getitem__)


class ReplicaSlots:
    """The replicas in a run's folder; thread-safe. No other process writes replicas there."""

    def __init__(self, folder: str, *, run: str) -> None:
        self._folder = folder
        self._run = run
        self._lock = threading.Lock()
        self.kept: frozenset[int] = frozenset()  # the only ranks whose replicas are accepted
        self._arriving: set[int] = set()

    def drop_others(self) -> None:
        """Remove the replicas of ranks that are not kept any more; a reader that has one mapped keeps its memory."""
        for name in slot_names(self._folder):
            if name.kind == "replica" and name.rank not in self.kept:
                remove_slot(self._folder, name)

    def take(self, put: Put, *, go: Callable[[], None], receive: Callable[[memoryview], int]) -> bool:
        """Store a replica; returns False, with nothing received, if it is here already.

        `go` is called when there is room; `receive` fills the beginning of a buffer, and returns how much. After any failure
        the rank's replica of `put.safe`, or without it the newest whole one, is unchanged.

        Raises: RefusedError if it is not wanted, or not now; CheckpointError if memory is short, or the bytes do not match
        their digests; OSError; the errors of `go` and `receive`.
        """
        run, rank = put.facts.run, put.facts.rank
        if run != self._run:
            raise RefusedError(f"this host keeps replicas of run {self._run}, not of {run!r:.200}")
        if rank not in self.kept:
            raise RefusedError(f"this host does not keep replicas of rank {rank}")
        with self._lock:
            if rank in self._arriving:
                # A sender that reconnects can meet its own first attempt, which has not noticed the lost connection yet.
                raise RefusedError(f"a replica of rank {rank} is arriving already")
            self._arriving.add(rank)
        try:
            paths = [f"{self._folder}/{SlotName('replica', rank, index)}" for index in range(REPLICA_SLOTS)]
            found = [facts_in(path) for path in paths]
            for path, facts in zip(paths, found, strict=True):
                if facts is not None and facts == put.facts and load_digests(path, facts) == put.digests:
                    return False
            held = [facts if facts is not None and (facts.run, facts.rank) == (run, rank) else None for facts in found]
            self._fill(paths[choose_replica_slot(held, safe=put.safe)], put, go=go, receive=receive)
            return True
        finally:
            with self._lock:
                self._arriving.remove(rank)

    def _fill(self, path: str, put: Put, *, go: Callable[[], None], receive: Callable[[memoryview], int]) -> None:
        size_bytes, there = put.layout.size_bytes, 0
        with suppress(FileNotFoundError):
            there = os.lstat(path).st_size
        if there != HEADER_BYTES + size_bytes:
            # What the slot already has is not counted twice.
            memory, needed = memory_of(self._folder, held_bytes=there), HEADER_BYTES + size_bytes
            choice = decide_buffers(memory, wanted=1, replicate=False, snapshot_bytes=needed, replica_bytes=0)
            if not choice.per_rank:
                raise CheckpointError(choice.shortage)
        slot = Slot.make(path, size_bytes=size_bytes)
        try:
            if not slot.lock(shared=False):
                raise RefusedError(f"the older replica of rank {put.facts.rank} is being read")
            slot.begin()
            store_layout(self._folder, put.layout)
            store_digests(path, put.facts, put.digests)
            go()
            _receive_into(slot, put, receive)
            # The roster may have changed meanwhile, and the slot may have been removed.
            if put.facts.rank not in self.kept or not slot.is_current():
                raise RefusedError(f"this host does not keep replicas of rank {put.facts.rank} any more")
            slot.complete(put.facts)
        finally:
            slot.close()


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


class PeerServer:
    """Serves one run's folder in host memory. Until it has a token it admits no peer."""

    def __init__(
        self,
        folder: str,
        *,
        run: str,
        address: str,
        port: int = 0,
        connections: int = CONNECTIONS,
        limits: Limits | None = None,
    ) -> None:
        """Listens at `address`, where others reach this host; port 0: any free one. Raises: TransportError naming both."""
        self._folder = folder
        self._limits = limits or Limits()
        self.replicas = ReplicaSlots(folder, run=run)
        try:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((str(place[0]), port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise TransportError(f"other hosts cannot reach snapshots at {address}, port {port}: {error}") from error
        self.port: int = listener.getsockname()[1]
        self._server = ChannelServer(
            [listener],
            handshake=HANDSHAKE,
            serve=self._serve,
            connections=connections,
            place_s=self._limits.idle_s,
            limits=PendingLimits(handshake_s=min(self._limits.handshake_s, PendingLimits().handshake_s)),
            name="peers",
        )
        self._server.start()

    def set_token(self, token: bytes) -> None:
        """Admit only peers with this token from now on; connections with another one end."""
        self._server.set_secret(Secret(token))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Disconnect all peers; returns whether all threads ended in time. A replica that was arriving stays incomplete."""
        return self._server.close(timeout_s)

    def _serve(self, channel: Channel) -> None:
        while True:
            message = channel.receive_json(limit_s=self._limits.io_s, idle_s=self._limits.idle_s)
            try:
                request = parse_request(message)
                if isinstance(request, Get):
                    self._give(channel, request)
                else:
                    self._take(channel, request)
            except RefusedError as error:
                # Before the first byte of a snapshot, or after its last: the next request can be read from its beginning.
                channel.send_json({"ok": False, "code": error.code, "error": str(error)}, limit_s=self._limits.io_s)

    def _give(self, channel: Channel, get: Get) -> None:
        with locked_snapshot(self._folder, get) as slot:
            with slot.data as data:
                size_bytes = len(data)
            end = get.start + get.length
            if end > size_bytes:
                raise RefusedError(f"{get} has {size_bytes} bytes, not {end}", code="malformed")
            channel.send_json({"ok": True}, limit_s=self._limits.io_s)
            buffer = memoryview(bytearray(min(FRAME_BYTES, get.length)))
            for start in range(get.start, end, FRAME_BYTES):
                part = buffer[: end - start]
                slot.read_into(part, start=start)
                channel.send_data(part, limit_s=self._limits.io_s)

    def _take(self, channel: Channel, put: Put) -> None:
        try:
            stored = self.replicas.take(
                put,
                go=lambda: channel.send_json({"ok": True, "send": True}, limit_s=self._limits.io_s),
                receive=lambda part: channel.receive_data(part, limit_s=self._limits.io_s),
            )
        except (CheckpointError, OSError, MemoryError) as error:
            raise RefusedError(str(error)) from error
        channel.send_json({"ok": True, "send": False, "stored": stored}, limit_s=self._limits.io_s)
