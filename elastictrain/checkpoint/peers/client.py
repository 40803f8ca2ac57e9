"""The requesting side: reads snapshots of other hosts, and sends replicas to them. Free of torch."""

import queue
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.folder import Held
from elastictrain.checkpoint.memory.slot import ReadSnapshot, Slot, SnapshotFacts
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.requests import HANDSHAKE, Get, Limits, Put, request_to_json
from elastictrain.errors import ObjectNotFoundError, StorageError, TransientStorageError
from elastictrain.net.channel import FRAME_BYTES, Channel, ChannelError, Secret, connect

POOL_CONNECTIONS = 4


class PeerConnection:
    """A connection to one peer, opened at the first request; for one thread at a time."""

    def __init__(self, peer: Peer, *, token: bytes, limits: Limits | None = None) -> None:
        self._peer = peer
        self._token = token
        self._limits = limits or Limits()
        self._channel: Channel | None = None
        self._broken_off = False

    def get_into(self, buffer: memoryview, facts: SnapshotFacts, *, start: int) -> None:
        """Fill `buffer` with bytes [start, start + len) of a snapshot; reconnects once if the connection breaks.
        Raises: ObjectNotFoundError if the peer does not have it; TransientStorageError. Both name host and address."""
        get = Get(facts.run, facts.incarnation, facts.step, facts.rank, start, len(buffer))
        what = f"{get} cannot be read"
        for last_try in (False, True):
            try:
                channel = self._connected(what)
                channel.send_json(request_to_json(get), limit_s=self._limits.io_s)
                self._answer(channel, what, limit_s=self._limits.io_s)
                filled = 0
                while filled < len(buffer):
                    filled += channel.receive_data(buffer[filled:], limit_s=self._limits.io_s)
                return
            except ChannelError as error:
                self.close()
                if last_try:
                    raise self._error(what, str(error)) from error

    def put(self, put: Put, source: Slot, *, before_frame: Callable[[int], None]) -> bool:
        """Send a replica; returns False, with nothing sent, if the peer has it already.

        `before_frame` is called with the number of bytes before they are sent; it may wait, or break off by raising.

        Raises: TransientStorageError naming host and address; the errors of `source` and `before_frame`.
        """
        what = f"the replica of rank {put.facts.rank} at step {put.facts.step} cannot be kept"
        size_bytes = put.layout.size_bytes
        try:
            channel = self._connected(what)
            channel.send_json(request_to_json(put), limit_s=self._limits.io_s)
            if not self._answer(channel, what, limit_s=self._limits.prepare_s).get("send"):
                return False
            buffer = memoryview(bytearray(min(FRAME_BYTES, size_bytes)))
            for start in range(0, size_bytes, FRAME_BYTES):
                part = buffer[: size_bytes - start]
                source.read_into(part, start=start)
                before_frame(len(part))
                channel.send_data(part, limit_s=self._limits.io_s)
            self._answer(channel, what, limit_s=self._limits.prepare_s)
        except ChannelError as error:
            self.close()
            raise self._error(what, str(error)) from error
        except BaseException:
            # In the middle of a replica: the connection can carry no other request.
            self.close()
            raise
        return True

    def break_off(self) -> None:
        """Make the running and all later requests fail at once; for other threads."""
        self._broken_off = True
        channel = self._channel
        if channel is not None:
            channel.break_off()

    def close(self) -> None:
        """Disconnect; the next request connects anew."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connected(self, what: str) -> Channel:
        if self._channel is not None:
            return self._channel
        try:
            # Stored at once: `break_off` must reach the handshake, too.
            channel = self._channel = connect(self._peer.address, self._peer.port, limit_s=self._limits.connect_s)
        except ChannelError as error:
            raise self._error(what, f"no connection: {error}") from error
        if self._broken_off:
            raise ChannelError("it is broken off")
        try:
            HANDSHAKE.introduce(channel, Secret(self._token), limit_s=self._limits.handshake_s)
        except BaseException:
            self.close()
            raise
        return channel

    def _answer(self, channel: Channel, what: str, *, limit_s: float) -> dict[str, JsonValue]:
        answer = channel.receive_json(limit_s=limit_s)
        if answer.get("ok") is True:
            return answer
        raise self._error(what, str(answer.get("error")), missing=answer.get("code") == "missing")

    def _error(self, what: str, why: str, *, missing: bool = False) -> StorageError:
        return (ObjectNotFoundError if missing else TransientStorageError)(f"{self._peer.place}: {what}: {why}")


class OtherHosts:
    """A pool of connections to the saver of each other host; several threads read snapshots while this rank restores."""

    def __init__(self, roster: Sequence[Peer], *, token: bytes, limits: Limits | None = None) -> None:
        self._idle: dict[int, queue.LifoQueue[PeerConnection]] = {}
        for peer in roster:
            idle = self._idle[peer.number] = queue.LifoQueue()
            for _ in range(POOL_CONNECTIONS):
                idle.put(PeerConnection(peer, token=token, limits=limits))

    def __call__(self, held: Held) -> ReadSnapshot:
        """Return a reader of a snapshot on another host. Raises: TransientStorageError if that host is not in the roster."""
        idle = self._idle.get(held.host)
        if idle is None:
            raise TransientStorageError(f"host number {held.host} is not in the roster")

        def read_peer(buffer: memoryview, start: int) -> None:
            # LIFO: the connection used last is the most likely to be still open.
            connection = idle.get()
            try:
                connection.get_into(buffer.cast("B"), held.facts, start=start)
            finally:
                idle.put(connection)

        return read_peer

    def close(self) -> None:
        """Disconnect, once all reads have ended."""
        for idle in self._idle.values():
            for connection in idle.queue:
                connection.close()
