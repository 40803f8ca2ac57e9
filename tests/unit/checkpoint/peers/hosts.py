"""Hosts on loopback, snapshots in their folders, and a line between them that garbles or breaks what goes through it."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.memory.folder import look
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, store_digests, store_layout
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.checkpoint.peers.client import PeerConnection
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.requests import Limits, Put
from elastictrain.checkpoint.peers.server import PeerServer

RUN = "run0"
TOKEN = b"the token of this incarnation"
LIMITS = Limits(connect_s=2.0, handshake_s=2.0, io_s=2.0, prepare_s=5.0, idle_s=5.0)


def layout_of(kilobytes: int = 2500) -> RankLayout:
    """Two files and a scalar, several chunks, more than one frame, and padding between files."""
    rows = kilobytes * 1000 // 400
    items = (
        Item("head", "float32", (rows // 2, 100), (0, 0), (rows // 2, 100)),
        Item("scale", "float32", (), (), ()),
        Item("tail", "float32", (rows // 2, 100), (0, 0), (rows // 2, 100)),
    )
    return RankLayout(items, shard_bytes=max(1, kilobytes * 600), chunk_bytes=300_000)


LAYOUT = layout_of()


def facts_of(rank: int = 0, step: int = 1, *, layout: RankLayout = LAYOUT, incarnation: str = "i00001-aa") -> SnapshotFacts:
    return SnapshotFacts(1, RUN, incarnation, step, 8, rank, layout.digest, "c", 1.5, "", {"step": step})


class Whole(bytearray):
    """The bytes of a snapshot, to be read like a slot."""

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        buffer[:] = self[start : start + len(buffer)]


def put_of(facts: SnapshotFacts, *, layout: RankLayout = LAYOUT) -> tuple[Put, Whole]:
    """A snapshot's bytes, different for each rank and step, and what goes before them."""
    data = Whole(random.Random(f"{facts.rank} {facts.step}").randbytes(layout.size_bytes))
    for file, base in zip(layout.template, layout.starts, strict=True):
        data[base : base + len(file.header)] = file.header
    return Put(facts, layout, compute_digests(cast(Slot, data), layout, threads=1)), data


def fill_slot(folder: Path, name: str, facts: SnapshotFacts, *, layout: RankLayout = LAYOUT, digests: bool = True) -> bytearray:
    """A whole snapshot in a slot, as a worker and its saver leave it."""
    put, data = put_of(facts, layout=layout)
    slot = Slot.make(str(folder / name), size_bytes=layout.size_bytes)
    try:
        deadline = time.monotonic() + 5
        while not slot.lock(shared=False):
            assert time.monotonic() < deadline, "somebody reads it for ever"
            time.sleep(0.005)
        slot.begin()
        with slot.data as view:
            view[:] = data
        slot.complete(facts)
    finally:
        slot.close()
    store_layout(str(folder), layout)
    if digests:
        store_digests(slot.path, facts, put.digests)
    return data


@dataclass(frozen=True)
class Host:
    folder: Path
    server: PeerServer
    peer: Peer

    def replicas(self) -> dict[str, int]:
        """Step of each whole replica, by slot."""
        return {held.slot: held.facts.step for held in look(str(self.folder), host=0) if held.replica}

    def data_of(self, slot: str) -> bytes:
        opened = Slot.open(str(self.folder / slot))
        try:
            assert opened.facts is not None
            assert load_digests(opened.path, opened.facts) is not None
            return bytes(opened.data)
        finally:
            opened.close()


@contextmanager
def host(folder: Path, *, kept: tuple[int, ...] = (0,), limits: Limits = LIMITS, connections: int = 8) -> Iterator[Host]:
    folder.mkdir(mode=0o700, exist_ok=True)
    server = PeerServer(str(folder), run=RUN, address="127.0.0.1", connections=connections, limits=limits)
    server.set_token(TOKEN)
    server.replicas.kept = frozenset(kept)
    try:
        yield Host(folder, server, Peer("b", "127.0.0.1", server.port, kept, 1))
    finally:
        assert server.close()


@contextmanager
def connected(peer: Peer, *, token: bytes = TOKEN, limits: Limits = LIMITS) -> Iterator[PeerConnection]:
    connection = PeerConnection(peer, token=token, limits=limits)
    try:
        yield connection
    finally:
        connection.close()


class Line:
    """Passes bytes on in both directions; `flip_at` and `cut_at` count bytes from the client to the server or back."""

    def __init__(self, peer: Peer) -> None:
        self._target = (peer.address, peer.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.peer = replace(peer, port=self._listener.getsockname()[1])
        self.flip_at: dict[str, int] = {}
        self.cut_at: dict[str, int] = {}
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._carry, args=(near,))
            self._threads.append(thread)
            thread.start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._pump, args=(far, near, "back"))
            back.start()
            self._pump(near, far, "there")
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                flip, cut = self.flip_at.get(way, -1), self.cut_at.get(way, -1)
                if passed <= flip < passed + len(data):
                    data[flip - passed] ^= 1
                    del self.flip_at[way]
                if passed <= cut < passed + len(data):
                    self.cut_at.pop(way, None)
                    break
                target.sendall(data)
                passed += len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def line_to(peer: Peer) -> Iterator[Line]:
    with ExitStack() as stack:
        line = Line(peer)
        stack.callback(line.close)
        yield line
