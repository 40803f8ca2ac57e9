"""The saver's part in the peer tier: serves its snapshots to other hosts, keeps theirs, and sends its own to one of them."""

import logging
from collections.abc import Callable

from elastictrain.checkpoint.memory.folder import look
from elastictrain.checkpoint.memory.slot import SnapshotId
from elastictrain.checkpoint.peers.pace import MOST_RATE, Pacer
from elastictrain.checkpoint.peers.placement import replica_sources_of, replica_target_of
from elastictrain.checkpoint.peers.replicator import Replicator
from elastictrain.checkpoint.peers.server import PeerServer
from elastictrain.checkpoint.saver.messages import SaverRoster
from elastictrain.errors import TransportError
from elastictrain.events import Event, Replicated, ReplicationFailed

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0


class ReplicaService:
    """All traffic between this host and others; used by the saver's own thread alone."""

    def __init__(
        self, folder: str, run: str, *, record: Callable[[str, Event], None], ended: Callable[[str, int, bool], None]
    ) -> None:
        """`record` takes the event's incarnation first. `ended` takes incarnation and step of an ended transfer, and whether it
        arrived. Other threads call both."""
        self._folder = folder
        self._run = run
        self._record = record
        self._ended = ended
        self._server: PeerServer | None = None
        self._address = ""
        self._roster: SaverRoster | None = None
        self._replicator: Replicator | None = None
        self.pacer = Pacer()  # measures what does not slow training down on this network; kept, so that it is measured once

    def listen(self, address: str, *, port: int) -> int:
        """Listen on this address, if possible on `port`, which others know; returns the port, 0 if there is none."""
        if not address:
            return 0
        if self._server is not None and self._address == address:
            return self._server.port
        if self._server is not None:
            self._server.close(_CLOSE_S)
            self._server = None
        for wanted in dict.fromkeys((port, 0)):
            try:
                self._server = PeerServer(self._folder, run=self._run, address=address, port=wanted)
            except TransportError as error:
                logger.warning("%s", error)
                continue
            self._address = address
            return self._server.port
        return 0

    def begin_incarnation(self) -> None:
        """Forget the other hosts; without any, no roster follows. Their replicas stay until `drop_others`."""
        self._stop_sending()
        self._roster = None
        if self._server is not None:
            self._server.replicas.kept = frozenset()

    def set_roster(self, roster: SaverRoster) -> None:
        self._stop_sending()
        self.pacer.forget_steps()
        self._roster = roster
        if self._server is not None:
            self._server.set_token(bytes.fromhex(roster.token))
            sources = replica_sources_of(roster.own_peer, roster.hosts)
            self._server.replicas.kept = frozenset(rank for source in sources for rank in source.ranks)

    def send(self, step: int | None, *, incarnation: str, safe: SnapshotId | None = None, unpaced: bool = False) -> None:
        """Send this host's snapshots of a step, and none older; None: stop. `safe`: of which the other hosts have all replicas,
        and keep them. `unpaced`: no training could be slowed down."""
        if step is None:
            self._stop_sending()
            return
        held = {
            one.facts.rank: one for one in look(self._folder, host=0) if not one.replica and one.facts.id == (incarnation, step)
        }
        ranks = self._roster.own_peer.ranks if self._roster is not None else ()
        self._replicator = self._replicator or self._begin_sending(incarnation, unpaced=unpaced)
        if self._replicator is None or any(rank not in held for rank in ranks):
            self._ended(incarnation, step, False)
        else:
            self._replicator.send([held[rank] for rank in ranks], safe=safe)

    def _begin_sending(self, incarnation: str, *, unpaced: bool) -> Replicator | None:
        roster = self._roster
        target = None if roster is None else replica_target_of(roster.own_peer, roster.hosts)
        if roster is None or target is None:
            return None
        arrived: dict[int, set[int]] = {}

        def replicated(rank: int, step: int, size_bytes: int, seconds: float) -> None:
            self._record(incarnation, Replicated(of_rank=rank, step=step, host=target.host, bytes=size_bytes, seconds=seconds))
            arrived.setdefault(step, set()).add(rank)
            if arrived[step] >= set(roster.own_peer.ranks):
                self._ended(incarnation, step, True)

        def failed(rank: int, step: int, error: str) -> None:
            logger.warning("step %d of rank %d is not replicated: %s", step, rank, error)
            self._record(incarnation, ReplicationFailed(of_rank=rank, step=step, host=target.host, error=error))
            self._ended(incarnation, step, False)

        pacer = Pacer(MOST_RATE) if unpaced else self.pacer
        token = bytes.fromhex(roster.token)
        return Replicator(self._folder, target=target, token=token, replicated=replicated, failed=failed, pacer=pacer)

    def step_took(self, seconds: float) -> None:
        """Report the duration of a training step: replicas must not slow it down."""
        (self._replicator or self.pacer).step_took(seconds)

    def drop_others(self) -> None:
        if self._server is not None:
            self._server.replicas.drop_others()

    def close(self) -> None:
        self._stop_sending()
        if self._server is not None:
            self._server.close(_CLOSE_S)

    def _stop_sending(self) -> None:
        if self._replicator is not None:
            self._replicator.close(_CLOSE_S)
            self._replicator = None
