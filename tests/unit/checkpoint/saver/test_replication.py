"""The saver's part in the peer tier: how fast it sends, and what it remembers of that."""

import queue
from pathlib import Path

import pytest

from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.saver.messages import SaverRoster
from elastictrain.checkpoint.saver.replication import ReplicaService
from tests.unit.checkpoint.peers.hosts import RUN, TOKEN, facts_of, fill_slot, host

INCARNATION = "i00001-aa"


def test_a_host_that_trains_no_more_sends_as_fast_as_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pace that was found not to hold up training this snapshot would take more than half an hour."""
    folder, ended = tmp_path / "a", queue.SimpleQueue[tuple[str, int, bool]]()
    folder.mkdir(mode=0o700)
    fill_slot(folder, "own-r00000-s0", facts_of(0, 7))
    replicas = ReplicaService(
        str(folder), RUN, record=lambda incarnation, event: None, ended=lambda *arguments: ended.put(arguments)
    )
    with host(tmp_path / "b", kept=(0,)) as buddy:
        hosts = (Peer("a", "127.0.0.1", 1, (0,), 0), Peer("b", "127.0.0.1", buddy.peer.port, (1,), 1))
        replicas.set_roster(SaverRoster(hosts, 0, TOKEN.hex()))
        replicas.pacer.rate = 1000.0
        replicas.send(7, incarnation=INCARNATION, unpaced=True)
        assert ended.get(timeout=10.0) == (INCARNATION, 7, True)
        assert buddy.replicas() == {"replica-r00000-s0": 7}
        replicas.send(None, incarnation=INCARNATION)
        # Who trains next on this host must not be slowed down.
        assert replicas.pacer.rate == 1000.0
        replicas.close()


def test_replicas_of_hosts_that_have_left_stay_until_they_are_of_no_use(tmp_path: Path) -> None:
    """The next incarnation may restore from them; alone, it gets no roster that says which ones to keep."""
    folder = tmp_path / "a"
    folder.mkdir(mode=0o700)
    replicas = ReplicaService(str(folder), RUN, record=lambda *_: None, ended=lambda *_: None)
    port = replicas.listen("127.0.0.1", port=0)
    hosts = (Peer("a", "127.0.0.1", port, (0,), 0), Peer("b", "127.0.0.1", 1, (1,), 1))
    replicas.set_roster(SaverRoster(hosts, 0, TOKEN.hex()))
    fill_slot(folder, "replica-r00001-s0", facts_of(1, 7))
    replicas.drop_others()
    replicas.begin_incarnation()
    assert (folder / "replica-r00001-s0").exists()
    replicas.drop_others()
    assert not (folder / "replica-r00001-s0").exists()
    replicas.close()
