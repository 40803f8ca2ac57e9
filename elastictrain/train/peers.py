"""Reads snapshots from the memory of other hosts, while this rank restores."""

from collections.abc import Mapping, Sequence

from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.source import FileBytes
from elastictrain.checkpoint.peers.client import PeerPool, files_of_peer
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.requests import key_of
from elastictrain.errors import TransientStorageError


class OtherHosts:
    """Connections to the keepers of other hosts, made when they are needed."""

    def __init__(self, roster: Sequence[Peer], *, token: bytes) -> None:
        self._peers = {peer.number: peer for peer in roster}
        self._token = token
        self._pools: dict[int, PeerPool] = {}

    def __call__(self, held: Held, layout: RankLayout) -> Mapping[str, FileBytes]:
        """The files of a snapshot that another host holds. Raises: TransientStorageError if it is not in the roster."""
        peer = self._peers.get(held.host)
        if peer is None:
            raise TransientStorageError(f"host number {held.host} is not in the roster")
        pool = self._pools.setdefault(held.host, PeerPool(peer, token=self._token))
        return files_of_peer(pool, layout, key_of(held.facts))

    def close(self) -> None:
        """Hang up."""
        for pool in self._pools.values():
            pool.close()
