"""The side that listens: gives out snapshots of this host, and takes replicas of others. Free of torch."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.folder import slot_names
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.peers.replica_store import RefusedError, ReplicaSlots
from elastictrain.checkpoint.peers.requests import (
    HANDSHAKE,
    Limits,
    RequestError,
    SnapshotKey,
    get_from_json,
    key_of,
    put_from_json,
)
from elastictrain.errors import CheckpointError, TransportError
from elastictrain.net.channel import FRAME_BYTES, Channel, Secret
from elastictrain.net.server import BACKLOG, CONNECTIONS, ChannelServer, PendingLimits


@contextmanager
def locked_snapshot(folder: str, key: SnapshotKey) -> Iterator[Slot | None]:
    """The slot, own or replica, with exactly that snapshot, locked against its writer; None if there is none."""
    for name in slot_names(folder):
        if name.rank != key.rank:
            continue
        try:
            slot = Slot.hold(f"{folder}/{name}")
        except OSError:
            continue
        if slot is None:
            continue
        try:
            if (facts := slot.facts) is not None and key_of(facts) == key:
                yield slot
                return
        finally:
            slot.close()
    yield None


class PeerServer:
    """Serves one run's folder in host memory. Until it has a token it lets nobody in."""

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
        """`address`: of this host, where the others reach it; port 0: any that is free."""
        self._folder = folder
        self._run = run
        self._address = address
        self._port = port
        self._limits = limits or Limits()
        self._replicas = ReplicaSlots(folder, run=run)
        self._connections = connections
        self._server: ChannelServer | None = None

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return self._port

    def start(self) -> None:
        """Begin to listen. Raises: TransportError naming the address."""
        try:
            family, _, _, _, place = socket.getaddrinfo(self._address, self._port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((str(place[0]), self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise TransportError(
                f"other hosts cannot reach snapshots at {self._address}, port {self._port}: {error}"
            ) from error
        self._port = listener.getsockname()[1]
        handshake_s = min(self._limits.handshake_s, PendingLimits().handshake_s)
        self._server = ChannelServer(
            [listener],
            handshake=HANDSHAKE,
            serve=self._serve,
            connections=self._connections,
            place_s=self._limits.idle_s,
            limits=PendingLimits(handshake_s=handshake_s),
            name="peers",
        )
        self._server.start()

    def set_token(self, token: bytes) -> None:
        """Once started: only whoever has this token is let in from now on; connections under another one end."""
        if self._server is not None:
            self._server.set_secret(Secret(token))

    def set_kept(self, ranks: Iterable[int]) -> None:
        """Replicas of these ranks are taken from now on, and of no others."""
        self._replicas.set_kept(ranks)

    def drop_others(self) -> None:
        """Remove the replicas of ranks that are not kept."""
        self._replicas.drop_others()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Hang up everywhere; whether all threads ended within the time. A replica that was arriving stays torn."""
        return self._server is None or self._server.close(timeout_s)

    def _serve(self, channel: Channel) -> None:
        while True:
            self._answer(channel, channel.receive_json(limit_s=self._limits.io_s, idle_s=self._limits.idle_s))

    def _answer(self, channel: Channel, message: dict[str, JsonValue]) -> None:
        match message.get("op"):
            case "get":
                self._get(channel, message)
            case "put":
                self._put(channel, message)
            case other:
                self._refuse(channel, "malformed", f"{other!r:.200} is no request")

    def _get(self, channel: Channel, message: dict[str, JsonValue]) -> None:
        try:
            get = get_from_json(message)
        except RequestError as error:
            self._refuse(channel, "malformed", str(error))
            return
        with locked_snapshot(self._folder, get.key) as slot:
            if slot is None:
                self._refuse(channel, "missing", f"{get.key} is not here")
                return
            with slot.data as data:
                size_bytes = len(data)
            end = get.start + get.length
            if end > size_bytes:
                self._refuse(channel, "malformed", f"{get.key} has {size_bytes} bytes, not {end}")
                return
            channel.send_json({"ok": True}, limit_s=self._limits.io_s)
            buffer = memoryview(bytearray(min(FRAME_BYTES, get.length)))
            for start in range(get.start, end, FRAME_BYTES):
                part = buffer[: end - start]
                slot.read_into(part, start=start)
                channel.send_data(part, limit_s=self._limits.io_s)

    def _put(self, channel: Channel, message: dict[str, JsonValue]) -> None:
        try:
            stored = self._replicas.take(
                put_from_json(message),
                go=lambda: channel.send_json({"ok": True, "send": True}, limit_s=self._limits.io_s),
                receive=lambda part: channel.receive_data(part, limit_s=self._limits.io_s),
            )
        except RequestError as error:
            self._refuse(channel, "malformed", str(error))
        except (RefusedError, CheckpointError, OSError) as error:
            # Before the first byte of the replica, or after its last: the next request is read from its beginning.
            self._refuse(channel, "refused", str(error))
        else:
            channel.send_json({"ok": True, "send": False, "stored": stored}, limit_s=self._limits.io_s)

    def _refuse(self, channel: Channel, code: str, error: str) -> None:
        channel.send_json({"ok": False, "code": code, "error": error}, limit_s=self._limits.io_s)
