import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.preflight.host.ports import (
    Holder,
    PortFacts,
    WantedPort,
    find_holder,
    judge_ports,
    listeners,
    read_ports,
    try_port,
)
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.host.conftest import HostMaker

WANTED = WantedPort(29500, "rendezvous", "--rdzv-endpoint=HOST:PORT")
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0
   1: 0100007F:733C 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000000000000000 20 4 30 10 -1
   2: garbled
   3: 00000000:XXXX 00000000:0000 0A 0 0 0 0 0 4713 1
"""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_free_and_taken(taken: int) -> None:
    assert try_port(taken) == errno.EADDRINUSE
    assert try_port(0) is None
    assert try_port(70_000) == errno.EINVAL


def test_connections_that_are_over_are_no_hindrance() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        server.close()  # its side waits for a minute now
        client.close()
    assert try_port(port) is None


def test_holder_is_found_in_the_real_proc(taken: int) -> None:
    holder = find_holder(Surroundings(), taken)
    assert holder is not None
    assert (holder.pid, holder.ours) == (os.getpid(), True)


def test_port_that_our_own_process_holds_is_no_fault(taken: int) -> None:
    (facts,) = read_ports(Surroundings(), [WantedPort(taken, "rendezvous", "--rdzv-endpoint")])
    (verdict,) = judge_ports([facts], host="h1")
    assert verdict.status is Status.PASS


def test_holder_in_a_made_up_proc(make_host: HostMaker) -> None:
    host = make_host(
        {"proc/net/tcp": TCP, "proc/net/tcp6": "", "proc/7/cmdline": "python\0-m\0http.server\0secret", "proc/9/comm": "other"}
    )
    assert find_holder(host, 29500) is None
    for pid, inode in ((9, 4712), (7, 4711)):
        folder = Path(host.root / f"proc/{pid}/fd")
        folder.mkdir()
        (folder / "3").symlink_to(f"socket:[{inode}]")
    assert list(listeners(host, "tcp", 29500)) == [4711]
    assert find_holder(host, 29500) == Holder(7, "python -m http.server")


def test_verdicts() -> None:
    holder = Holder(7, "python -m http.server")
    cases = [
        PortFacts(WANTED, None),
        PortFacts(WANTED, errno.EADDRINUSE, holder),
        PortFacts(WANTED, errno.EADDRINUSE),
        PortFacts(WantedPort(80, "web", "--port"), errno.EACCES),
        PortFacts(WANTED, errno.EADDRNOTAVAIL),
    ]
    free, held, taken, denied, other = judge_ports(cases, host="h1")
    assert free.status is Status.PASS
    assert [verdict.status for verdict in (held, taken, denied, other)] == [Status.FAIL] * 4
    assert held.measured == "port 29500 (rendezvous) held by pid 7 (python -m http.server)"
    assert "on h1 end pid 7" in held.remedy
    assert "`kill 7`" in held.remedy
    assert "--rdzv-endpoint=HOST:PORT" in held.remedy
    assert "ss -ltnp sport = :29500" in taken.remedy
    assert "from 1024 up" in denied.remedy
    assert os.strerror(errno.EADDRNOTAVAIL) in str(other.measured)


def test_nothing_wanted() -> None:
    assert judge_ports([], host="h1") == []
