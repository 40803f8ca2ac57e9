"""Listeners on given and on spread ports of loopback."""

import socket
from pathlib import Path

import pytest

from elastictrain.net import listening
from elastictrain.net.listening import listen, read_port_range


def ports_of(address: str, ports: tuple[int, ...]) -> list[int]:
    made = listen(address, ports)
    found = [one.getsockname()[1] for one in made]
    for one in made:
        one.close()
    return found


def test_ports_are_spread_over_the_kernels_range() -> None:
    first, last = read_port_range()
    for _ in range(20):
        found = ports_of("127.0.0.1", (0, 0, 0, 0))
        assert [4 * (port - first) // (last - first + 1) for port in found] == [0, 1, 2, 3]


def test_given_ports_keep_their_places() -> None:
    (free,) = ports_of("127.0.0.1", (0,))
    found = ports_of("127.0.0.1", (0, free, 0))
    assert found[1] == free
    assert found[0] < found[2]


def test_a_given_port_that_is_taken_is_an_error_and_nothing_remains() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", (port,))
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", (0, port))


def test_where_all_picks_are_taken_any_port_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(listening, "read_port_range", lambda: (port, port))
        (found,) = ports_of("127.0.0.1", (0,))
    assert found != port


def test_where_the_kernel_does_not_tell_its_range_the_usual_one_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(listening, "_PORT_RANGE", tmp_path / "missing")
    assert read_port_range() == (32768, 60999)
