import selectors
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from elastictrain.distributed.gloo_sockets import WatchedDescriptor, cut_gloo_connections, is_gloo

PIPE = WatchedDescriptor(15, "pipe:[1]", 0x5651C09D5EC8)
SOCKET = WatchedDescriptor(18, "socket:[2]", 0x5651BB8B0620)
EVENT = WatchedDescriptor(19, "anon_inode:[eventfd]", 0x5651BB8B0628)


@pytest.mark.parametrize(
    ("watched", "expected"),
    [
        ([PIPE, SOCKET], True),
        ([SOCKET, PIPE, SOCKET], True),
        ([PIPE], False),
        ([SOCKET], False),
        ([], False),
        ([PIPE, SOCKET, EVENT], False),  # libuv
        ([PIPE, WatchedDescriptor(18, "socket:[2]", 18)], False),  # Python, libuv
        ([PIPE, WatchedDescriptor(18, "socket:[2]", 0x7F9D00000012)], False),  # asyncio leaves the upper half as it is
    ],
)
def test_gloo_is_known_by_what_it_watches(watched: list[WatchedDescriptor], expected: bool) -> None:
    assert is_gloo(watched) is expected


@pytest.fixture
def pair() -> list[ProcessGroupGloo]:
    """Two ranks of one gloo group, in this process."""
    store, ranks = dist.HashStore(), {}

    def join(rank: int) -> None:
        ranks[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ranks[0], ranks[1]]


def test_a_blocked_collective_raises_while_its_peer_lives(pair: list[ProcessGroupGloo]) -> None:
    work = pair[0].recv([torch.zeros(1)], 1, 0)
    assert cut_gloo_connections() >= 1
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=20))


def test_a_collective_that_begins_later_raises_too(pair: list[ProcessGroupGloo]) -> None:
    cut_gloo_connections()
    with pytest.raises(RuntimeError):
        pair[0].allreduce([torch.zeros(1)]).wait(timedelta(seconds=20))


def test_other_connections_stay(pair: list[ProcessGroupGloo]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
        selectors.EpollSelector() as selector,
    ):
        for one in (server, client, accepted):
            selector.register(one, selectors.EVENT_READ)
        assert cut_gloo_connections() >= 1
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"


def test_without_groups_nothing_is_cut() -> None:
    assert cut_gloo_connections() == 0
