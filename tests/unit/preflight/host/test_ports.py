import errno
import os
import socket
from collections.abc import Iterator

import pytest

from elastictrain.preflight.host.ports import Holder, WantedPort, check_port, find_holder, judge_port, try_port
from elastictrain.preflight.verdict import Status

WANTED = WantedPort(29500, "rendezvous", "--rdzv-endpoint=HOST:PORT")


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


def test_holder_is_found(taken: int) -> None:
    holder = find_holder(taken)
    assert holder is not None
    assert (holder.pid, holder.ours) == (os.getpid(), True)
    assert find_holder(1) is None


def test_port_that_our_own_process_holds_is_no_fault(taken: int) -> None:
    assert check_port(WantedPort(taken, "rendezvous", "--rdzv-endpoint"), host="h1").status is Status.PASS


def test_verdicts() -> None:
    holder = Holder(7, "python -m http.server")
    cases = [
        (WANTED, None, None),
        (WANTED, errno.EADDRINUSE, holder),
        (WANTED, errno.EADDRINUSE, None),
        (WantedPort(80, "web", "--port"), errno.EACCES, None),
        (WANTED, errno.EADDRNOTAVAIL, None),
    ]
    free, held, taken, denied, other = (judge_port(*case, host="h1") for case in cases)
    assert free.status is Status.PASS
    assert [verdict.status for verdict in (held, taken, denied, other)] == [Status.FAIL] * 4
    assert held.measured == "port 29500 (rendezvous) held by pid 7 (python -m http.server)"
    assert "on h1 end pid 7" in held.remedy
    assert "`kill 7`" in held.remedy
    assert "--rdzv-endpoint=HOST:PORT" in held.remedy
    assert "ss -ltnp sport = :29500" in taken.remedy
    assert "from 1024 up" in denied.remedy
    assert os.strerror(errno.EADDRNOTAVAIL) in str(other.measured)
