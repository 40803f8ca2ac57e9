import socket
import tracemalloc
from collections.abc import Iterator

import pytest

from elastictrain.errors import TransportError, UsageError
from elastictrain.preflight.links.speedtest import listen, measure_speed, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64M", 64 << 20),
        ("10G", 10 << 30),
        ("1k", 1024),
        ("1.5KiB", 1536),
        ("2 MB", 2 << 20),
        ("7", 7),
        ("7B", 7),
        ("1024T", 1 << 50),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "M", "-1M", "64X", "1e9", "64 M 3", "0", "0.1", "1025T", "٣M", "nan", "9" * 400])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_size(text)
    assert repr(text) in str(refused.value)


@pytest.fixture
def port() -> Iterator[int]:
    responder = listen("127.0.0.1", port=0, token="a word")
    yield responder.tcp_ports[0]
    responder.close()


def test_all_bytes_come_and_memory_stays_small(port: int) -> None:
    size_bytes = parse_size("64M")
    tracemalloc.start()
    found = measure_speed("127.0.0.1", port=port, token="a word", size_bytes=size_bytes)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 4
    assert all(8e-9 * size_bytes / seconds > 0.1 for seconds in found)
    assert most < 16 << 20


def test_a_size_that_is_no_multiple_of_anything(port: int) -> None:
    assert all(measure_speed("127.0.0.1", port=port, token="a word", size_bytes=1_000_003))


def test_what_takes_too_long_is_an_error(port: int) -> None:
    with pytest.raises(TransportError, match=str(1 << 45)):
        measure_speed("127.0.0.1", port=port, token="a word", size_bytes=1 << 45, limit_s=0.05)


def test_another_token_or_nobody_there(port: int) -> None:
    with pytest.raises(TransportError, match=f"127.0.0.1, port {port}: "):
        measure_speed("127.0.0.1", port=port, token="another", size_bytes=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match="refused"):
            measure_speed("127.0.0.1", port=free.getsockname()[1], token="a word", size_bytes=1)
